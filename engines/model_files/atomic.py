"""Replaces files atomically."""

import os
import threading
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` in one step, creating its directory. Blocks. Raises OSError, and then leaves no new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # Else the rename may reach the disk first, and a crash leaves an empty file.
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
