"""A file of log lines that several processes append to, and that may be moved away at any time."""

import logging
import os
from pathlib import Path

log = logging.getLogger("greenlane.log")

MODE = 0o640
"""Of a file that is made: its user's, to be read by its group. The umask may take more away."""


class LineFile(logging.Handler):
    """Writes each record as a line of the file of this name. Any thread.

    What cannot be written, as on a full disk, is lost and counted in the log; and the line after half a line begins a line.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or count it as lost. Called with the handler's lock held."""
        try:
            line = f"{self.format(record)}\n"
        except Exception:
            self.handleError(record)
            return
        try:
            append(self._path, line.encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._lost += 1
            log.error("%s: a line could not be written, and is lost: %s", self._path, error.strerror or error)
            return
        if self._lost:
            log.warning("%s: written again; lines lost before: %d", self._path, self._lost)
            self._lost = 0


def append(path: Path, line: bytes) -> None:
    """Append a line with its end to a file, which is made if there is none. Raises OSError.

    It begins a line, whatever another process has left unfinished. Blocks for as long as the disk does.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    file = os.open(path, flags, MODE)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        if (written := os.write(file, line)) < len(line):
            raise OSError(f"{written} of {len(line)} bytes were written; is the disk full?")
    finally:
        os.close(file)
