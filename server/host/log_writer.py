"""Writes log lines: limits their rate, so that clients cannot fill the disk, and never waits for the reader.

Or to a file that several processes append to, and that may be moved away at any time.
"""

import io
import logging
import os
import select
import socket
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

AT_ONCE = 200
"""Records of one kind that are written at once; after that one a second is, with the number of those left out before it."""
MAX_KINDS = 1024
"""Kinds that are remembered; the least recently seen is dropped."""
MAX_TEXT = 32 * 1024
"""Characters of one record; a longer one is cut."""

ALWAYS = "administrator"
"""As a record's `caller`: it is never left out."""

Kind = tuple[str, int, str, object, object]


class RateLimit(logging.Filter):
    """Drops records of a kind that come too often, so that no client can fill the disk.

    A kind is a logger, a level, the text without its arguments, a tenant, and the `caller` of a record that has one, whose
    flood leaves out nothing of others' then. `clock` is in seconds. Any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[Kind, tuple[float, float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write this record. Sets `left_out` to the number of records of its kind that were dropped before it, and
        `left_out_of` to their caller if they have one.
        """
        caller = getattr(record, "caller", None)
        if caller == ALWAYS:
            return True
        kind = record.name, record.levelno, str(record.msg), getattr(record, "tenant", None), caller
        with self._lock:
            now = self._clock()
            left, last, out = self._kinds.pop(kind, (float(AT_ONCE), now, 0))
            left = min(AT_ONCE, left + now - last)
            passes = left >= 1
            self._kinds[kind] = (left - 1, now, 0) if passes else (left, now, out + 1)
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
        if passes and out:
            record.left_out = out
            if caller:
                record.left_out_of = caller
        return passes


class Writer(logging.Handler):
    """Writes to a stream such as standard error. Lines that cannot be written at once are dropped, and counted in the next one.

    Otherwise a pipe that is no longer read would block the process at its next log line.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._rest = b""
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or count it as dropped. Called with the handler's lock held."""
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        lines = [text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text) - MAX_TEXT} characters more)"]
        if self._dropped:
            lines.insert(0, self.format(_dropped(self._dropped)))
        if self._write("".join(f"{line}\n" for line in lines)):
            self._dropped = 0
        else:
            self._dropped += 1

    def _write(self, text: str) -> bool:
        try:
            number = self._stream.fileno()
        except (io.UnsupportedOperation, AttributeError):
            self._stream.write(text)
            return True
        try:
            while self._rest:
                self._rest = self._rest[write(number, self._rest) :]
            data = text.encode("utf-8", "backslashreplace")
            self._rest = data[write(number, data) :]  # The rest of a partly written line goes before the next.
        except (OSError, ValueError):
            return False
        return True


def write(number: int, data: bytes) -> int:
    """Write to a descriptor without blocking; returns the number of bytes. Raises OSError, BlockingIOError if there is no room.

    O_NONBLOCK is not set on the descriptor itself: other programs, such as the shell in a terminal, may share it.
    """
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return os.write(number, data)
    if stat.S_ISSOCK(mode):
        with socket.socket(fileno=os.dup(number)) as end:
            return end.send(data, socket.MSG_DONTWAIT)
    try:
        own = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # It belongs to another user, or has no reader.
        return _write_if_possible(number, data)
    try:
        return os.write(own, data)
    finally:
        os.close(own)


def _write_if_possible(number: int, data: bytes) -> int:
    """The same for a descriptor that cannot be reopened. A pipe that is writable takes PIPE_BUF bytes at once."""
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(number, data[: select.PIPE_BUF])


def _dropped(count: int) -> logging.LogRecord:
    text = "%d log lines were dropped because standard error was not read"
    return logging.LogRecord("greenlane.log", logging.WARNING, __file__, 0, text, (count,), None)


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
