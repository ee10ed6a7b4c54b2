"""What three versions of the library offer, as JSON that `collect.py` took from the wheels of their Python bindings."""

import json
from collections.abc import Mapping
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
