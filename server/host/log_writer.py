"""Where log lines go: never so many that they fill the disk, and never so that a process waits for whom reads them."""

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
from typing import TextIO

BURST = 200
"""Records of one kind that are written at once; after those one a second is, which says how many were left out before it."""
MOST_KINDS = 1024
"""Kinds that are remembered; the one that was heard of least recently is forgotten."""
MOST_TEXT = 32 * 1024
"""Characters of one record; what is longer is cut."""

Kind = tuple[str, int, str, object]


class Limit(logging.Filter):
    """Leaves out what comes too often, so that no client can have the disk filled.

    A kind is a logger, a level, the text without its arguments, and a tenant. `clock` is in seconds. For any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[Kind, tuple[float, float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this is to be written; if others were left out before it, it says how many, as `left_out`."""
        kind = record.name, record.levelno, str(record.msg), getattr(record, "tenant", None)
        with self._lock:
            now = self._clock()
            left, last, out = self._kinds.pop(kind, (float(BURST), now, 0))
            left = min(BURST, left + now - last)
            passes = left >= 1
            self._kinds[kind] = (left - 1, now, 0) if passes else (left, now, out + 1)
            if len(self._kinds) > MOST_KINDS:
                self._kinds.popitem(last=False)
        if passes and out:
            record.left_out = out
        return passes


class Writer(logging.Handler):
    """Writes to a stream such as standard error. What cannot be written at once is dropped, and counted for the next line.

    A pipe that is not read any more would stop the process otherwise, at whatever it does when it has something to log.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._rest = b""
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, or count it. The handler's lock is held."""
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        lines = [text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}... ({len(text) - MOST_TEXT} characters more)"]
        if self._dropped:
            lines.insert(0, self.format(_dropped(self._dropped)))
        if self._say("".join(f"{line}\n" for line in lines)):
            self._dropped = 0
        else:
            self._dropped += 1

    def _say(self, text: str) -> bool:
        try:
            number = self._stream.fileno()
        except (io.UnsupportedOperation, AttributeError):
            self._stream.write(text)
            return True
        try:
            while self._rest:
                self._rest = self._rest[write(number, self._rest) :]
            data = text.encode("utf-8", "backslashreplace")
            self._rest = data[write(number, data) :]  # The rest of a line that was begun goes before the next.
        except (OSError, ValueError):
            return False
        return True


def write(number: int, data: bytes) -> int:
    """Write to a descriptor without waiting; how many bytes were written. Raises OSError, BlockingIOError for none now.

    The descriptor's own mode is left alone: other programs may share it, such as the shell whose terminal it is.
    """
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return os.write(number, data)
    if stat.S_ISSOCK(mode):
        with socket.socket(fileno=os.dup(number)) as end:
            return end.send(data, socket.MSG_DONTWAIT)
    try:
        own = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # Another user's, or nobody reads it.
        return _write_if_possible(number, data)
    try:
        return os.write(own, data)
    finally:
        os.close(own)


def _write_if_possible(number: int, data: bytes) -> int:
    """The same for what cannot be opened again: a pipe takes this many bytes at once if it takes any."""
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(number, data[: select.PIPE_BUF])


def _dropped(count: int) -> logging.LogRecord:
    text = "%d lines of the log were dropped, as nobody read them"
    return logging.LogRecord("greenlane.log", logging.WARNING, __file__, 0, text, (count,), None)
