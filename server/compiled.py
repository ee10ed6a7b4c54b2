"""Which modules run as machine code, as scripts/compile leaves it beside their sources, and whether those changed since."""

import logging
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

log = logging.getLogger("greenlane")

ROOT = Path(__file__).parents[1]


class Outdated(Exception):
    """What would run is not what the sources say."""


def ensure_current(root: Path = ROOT) -> None:
    """Raise Outdated for a module that was compiled from another source than the one beside it."""
    if changed := outdated(root):
        names = ", ".join(str(source.relative_to(root)) for source in changed)
        raise Outdated(f"changed since scripts/compile: {names}; run it again, or scripts/compile --remove to run the sources")


def announce() -> None:
    """Log what is compiled, if anything is."""
    if compiled := modules():
        log.info("compiled: %d modules, from %s to %s", len(compiled), compiled[0], compiled[-1])


def modules() -> list[str]:
    """Those of this server that were imported and are compiled."""
    return sorted(name for name in list(sys.modules) if name.startswith(f"{__package__}.") and _is_compiled(name))


def outdated(root: Path) -> list[Path]:
    """Sources in a checkout that are newer than what was compiled of them; what was installed elsewhere does not change."""
    if not (root / "setup.py").is_file():
        return []
    pairs = [(library, _source(library)) for library in sorted((root / "server").rglob("*.so"))]
    return [source for library, source in pairs if source.is_file() and source.stat().st_mtime > library.stat().st_mtime]


def _is_compiled(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None) or ""
    return file.endswith(tuple(EXTENSION_SUFFIXES)) and not name.endswith("__mypyc")


def _source(library: Path) -> Path:
    """`front.cpython-311-x86_64-linux-gnu.so` was made of `front.py`."""
    return library.with_name(library.name.partition(".")[0] + ".py")
