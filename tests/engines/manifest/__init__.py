"""What three versions of the library offer, as JSON that `collect.py` took from the wheels of their Python bindings."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

MANIFESTS: Mapping[str, Any] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(__file__).parent.glob("*.json"))
}
"""By library and version, such as `tensorrt-11.4.0.106`: the version, and the members of each class."""


def find_manifest(library: str, version: str = "") -> Any:
    """The newest one of a library whose version begins like this. Raises LookupError."""
    found = [name for name in MANIFESTS if name.startswith(f"{library}-{version}")]
    if not found:
        raise LookupError(f"no manifest of {library} {version}; there are {', '.join(MANIFESTS)}")
    return MANIFESTS[max(found, key=lambda name: [int(part) for part in name.rpartition("-")[2].split(".")])]


def takes(overload: Sequence[str], count: int | None, keywords: Collection[str]) -> bool:
    """Whether a call with so many arguments, None for any number, and these keywords fits an overload."""
    names = [each.rstrip("?") for each in overload]
    given = set(names[: count or 0]) | set(keywords)
    needed = {each for each in overload if not each.endswith("?")}
    fits = (count is None or count <= len(names)) and set(keywords) <= set(names[count or 0 :])
    return fits and (count is None or needed <= given)
