"""Files that a reader sees whole or not at all."""

import os
import threading
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step, making its directory where needed. Blocks. Raises OSError, and then leaves nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # A rename may reach the disk before what it names, and then a crash leaves it empty.
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
