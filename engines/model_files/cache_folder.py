"""The directory for built plans and compiled kernels, chosen when something is first to be kept. Files change atomically."""

import logging
import os
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

log = logging.getLogger("greenlane.engines")


class CacheFolder:
    """The first writable directory of several. Any thread may call.

    Nothing is checked or created before `path` is called, so a server that keeps nothing creates nothing.
    """

    def __init__(self, candidates: Iterable[Path]) -> None:
        self._candidates = tuple(candidates)
        self._lock = Lock()
        self._path: Path | None = None
        if not self._candidates:
            raise ValueError("a cache folder needs at least one directory to choose from")

    def __repr__(self) -> str:
        return f"<CacheFolder {self._path or ' or '.join(map(str, self._candidates))}>"

    def path(self) -> Path:
        """The directory, which is created. Blocks. The log says once which one it is, and why not an earlier one.

        If none is writable it is the last one: plans that were kept there earlier may still be read.
        """
        with self._lock:
            if self._path is None:
                self._path = self._choose()
            return self._path

    def _choose(self) -> Path:
        refusals: list[str] = []
        for candidate in self._candidates:
            if (refusal := _refusal(candidate)) is None:
                others = "".join(f"; not in {each}" for each in refusals)
                log.info("built plans and compiled kernels are kept in %s%s", candidate, others)
                return candidate
            refusals.append(f"{candidate} ({refusal})")
        log.warning(
            "nothing can be kept in %s: kernels are compiled at every start, and an ONNX file whose plan is not there yet "
            "is refused; name a directory that can be written (models.cache)",
            " or ".join(refusals),
        )
        return self._candidates[-1]


def _refusal(folder: Path) -> str | None:
    """Why a directory cannot be written; tries to create it and an unnamed file in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except FileExistsError:
        return "Not a directory"
    except OSError as error:
        return error.strerror or str(error)


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
