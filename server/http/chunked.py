"""The body of a request that comes in chunks (`Transfer-Encoding: chunked`), and where it ends."""

import re
from typing import Any

import httptools

from .strict import MAX_HEADER_BYTES

_HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")


class LongLines(Exception):
    """More than `MAX_HEADER_BYTES` came without a byte of the body."""


class ChunkedBody:
    """Belongs to the event loop.

    httptools reads the chunks, as it does for uvicorn, but does not say where the last of them ends, and the next request
    begins. That is found here, and has to be where httptools finds the end: what two readers could understand differently is
    refused. Trailers are dropped.
    """

    def __init__(self) -> None:
        self.complete = False
        """Whether the last chunk and the trailers have come."""
        self._pieces: list[bytes] = []
        self._line = b""  # The beginning of a line of which the end has not come.
        self._lines = 0  # Bytes of lines since the last byte of the body.
        self._left = 0  # Bytes of the current chunk, with its line end, that have not come.
        self._last = False  # The last chunk has come: what follows are trailers.
        self._parser: Any = httptools.HttpRequestParser(self)
        self._parser.feed_data(_HEAD)

    def feed(self, data: bytes) -> int:
        """Read on; how many of these bytes belong to the body. Raises httptools.HttpParserError, LongLines."""
        end, ended = self._find_end(data)
        self._parser.feed_data(data if end == len(data) else data[:end])
        if ended != self.complete:
            raise httptools.HttpParserError("the last chunk ends in two places")
        if self._lines > MAX_HEADER_BYTES:
            raise LongLines
        if ended:
            self.close()
        return end

    def take(self) -> bytes:
        """What has come of the body since the last call."""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        return data

    def close(self) -> None:
        """Break the cycle of parser and body, which only the garbage collector would free. Nothing may be fed afterwards."""
        self._parser = None

    def on_body(self, data: bytes) -> None:
        """Called by httptools with a piece of the body."""
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Called by httptools after the trailers."""
        self.complete = True

    def _find_end(self, data: bytes) -> tuple[int, bool]:
        """How many of these bytes belong to the body, and whether it ends there."""
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                self._lines = 0
                at += step
                continue
            end = data.find(b"\n", at) + 1
            line = self._line + data[at : end or len(data)]
            self._lines += (end or len(data)) - at
            at = end or len(data)
            self._line = b"" if end else line[: MAX_HEADER_BYTES + 1]
            if not end:
                break
            if self._last:
                if line == b"\r\n":
                    return at, True
            elif size := _SIZE.match(line):
                self._last = int(size[0], 16) == 0
                self._left = 0 if self._last else int(size[0], 16) + 2
            else:
                return len(data), False  # It is no size, which httptools refuses.
        return at, False
