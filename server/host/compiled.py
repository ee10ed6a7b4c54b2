"""Which modules run as machine code, as scripts/compile leaves it beside their sources, and whether it is of those sources."""

import logging
import sys
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

log = logging.getLogger("greenlane")

ROOT = Path(__file__).parents[2]
SUMS = "compiled.sums"
"""In `server`: what scripts/compile compiled, as sha256sum prints it."""


class Outdated(Exception):
    """What would run is not what the sources say."""


def ensure_current(root: Path = ROOT) -> None:
    """Raise Outdated for a module that was compiled from another source than the one beside it, or without the others.

    Only in a checkout; what was installed elsewhere does not change.
    """
    if not (root / "setup.py").is_file() or not (compiled := _compiled(root)):
        return
    if changed := _changed(root, compiled):
        raise Outdated(
            f"changed since scripts/compile: {', '.join(changed)}; run it again, or scripts/compile --remove to run the sources"
        )


def announce() -> None:
    """Log what is compiled, if anything is."""
    if compiled := modules():
        log.info("compiled: %d modules, from %s to %s", len(compiled), compiled[0], compiled[-1])


def modules() -> list[str]:
    """Those of this server that were imported and are compiled."""
    return sorted(name for name in list(sys.modules) if name.startswith(f"{__package__}.") and _is_compiled(name))


def _compiled(root: Path) -> set[str]:
    """The sources that this Python would pass over for what was compiled of them."""
    libraries = (root / "server").rglob(f"*{EXTENSION_SUFFIXES[0]}")
    names = {str(path.relative_to(root)).removesuffix(EXTENSION_SUFFIXES[0]) for path in libraries}
    return {f"{name}.py" for name in names if not name.endswith("__mypyc")}


def _changed(root: Path, compiled: set[str]) -> list[str]:
    """Sources that are not those that were compiled, and those of which only one, source or library, is there."""
    try:
        lines = (root / "server" / SUMS).read_text().splitlines()
    except FileNotFoundError:
        lines = []
    known = {name: digest for digest, name in (line.split() for line in lines)}
    present = [name for name in compiled if (root / name).is_file()]
    digests = {name: sha256((root / name).read_bytes()).hexdigest() for name in present}
    return sorted(name for name in known.keys() | digests.keys() if known.get(name) != digests.get(name))


def _is_compiled(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None) or ""
    return file.endswith(tuple(EXTENSION_SUFFIXES)) and not name.endswith("__mypyc")
