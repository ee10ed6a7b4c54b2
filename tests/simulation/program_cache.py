"""`cuda.core.utils` as far as `partitions.cuda.kernels` uses it. Names with an underscore first belong to the simulation."""

import hashlib
from pathlib import Path


class FileStreamProgramCache:
    """A file for each program, which has its source in place of code."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        for file in self._path.iterdir():
            file.unlink()

    def _read(self, code: str) -> str | None:
        try:
            return self._file(code).read_text()
        except FileNotFoundError:
            return None

    def _write(self, code: str) -> None:
        self._file(code).write_text(code)

    def _file(self, code: str) -> Path:
        return self._path / hashlib.sha256(code.encode()).hexdigest()
