"""Writes replies to a connection: small ones in one piece, large tensors from the slot that they are in."""

import os
from contextlib import suppress
from typing import Any

from .exchange import STATUS_LINES, Reply
from .inference import CLOSE, Success, success

_MIN_SEPARATE = 16 * 1024
"""Fewer bytes of tensors are joined with the rest sooner than passed to the system in pieces."""
_MAX_PIECES = 512
"""Linux takes 1024 pieces at a time."""


class ReplyWriter:
    """Writes the replies of one connection. `state` is uvicorn's ServerState, which has the headers of all replies."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._transport: Any = None
        self._descriptor = -1
        self._default_fields: list[tuple[bytes, bytes]] = []
        self._default_bytes = self._success = b""
        self._last: tuple[bytes, int] = b"", -1
        self._last_fields = b""
        self._in_chunks = False

    def open(self, transport: Any) -> None:
        """Write to this transport from now on."""
        self._transport = transport
        connected = transport.get_extra_info("socket")
        if connected is not None:
            self._descriptor = connected.fileno()

    def write(self, reply: Reply, closing: bool, is_http_1_0: bool, to_head: bool = False) -> None:
        """Write a reply, `to_head` without its body, as HEAD asks.

        Its tensors are not needed any more when this returns: what the socket did not take was copied. The transport must not
        be closing.
        """
        parts = self._head(reply.status, reply.fields, closing, is_http_1_0)
        separate = sum([len(each) for each in reply.tensors])
        if to_head:
            parts.append(b"content-length: %d\r\n\r\n" % (len(reply.body) + separate))
            self._transport.write(b"".join(parts))
            return
        parts += (b"content-length: %d\r\n\r\n" % (len(reply.body) + separate), reply.body)
        if separate >= _MIN_SEPARATE and len(reply.tensors) <= _MAX_PIECES:
            self._write_pieces([b"".join(parts), *reply.tensors])
        else:
            self._transport.write(b"".join([*parts, *reply.tensors]))

    def write_success(self, outcome: Success, closing: bool, is_http_1_0: bool) -> None:
        """As `write`, with the same bytes, for a successful inference, most of which differ from the last in tensors alone."""
        (document, tensors, start), timing = outcome
        if start is None or closing or is_http_1_0 or len(tensors) > _MAX_PIECES:
            self.write(success(outcome), closing, is_http_1_0)
            return
        size = sum([len(each) for each in tensors])
        if self._default_fields is not self._state.default_headers:
            self._update_default()
        if self._last[0] is not document or self._last[1] != size:
            self._last = document, size
            fields = b"\r\ninference-header-content-length: %d\r\ncontent-length: %d\r\n\r\n" % (start, start + size)
            self._last_fields = fields + document
        if size >= _MIN_SEPARATE:
            self._write_pieces([b"".join([self._success, timing, self._last_fields]), *tensors])
        else:
            self._transport.write(b"".join([self._success, timing, self._last_fields, *tensors]))

    def begin_parts(self, status: int, fields: list[tuple[bytes, bytes]], closing: bool, is_http_1_0: bool) -> None:
        """Write the head of an answer whose body comes in parts: in chunks, unless `fields` have its length, or in HTTP/1.0."""
        parts = self._head(status, fields, closing, is_http_1_0)
        self._in_chunks = not is_http_1_0 and all(name != b"content-length" for name, _ in fields)
        parts.append(b"transfer-encoding: chunked\r\n\r\n" if self._in_chunks else b"\r\n")
        self._transport.write(b"".join(parts))

    def write_part(self, data: bytes, last: bool) -> None:
        """Write a part of that body."""
        if self._in_chunks:
            chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data = chunk + b"0\r\n\r\n" if last else chunk
        self._transport.write(data)

    def _head(self, status: int, fields: list[tuple[bytes, bytes]], closing: bool, is_http_1_0: bool) -> list[bytes]:
        """The beginning of a head."""
        if self._default_fields is not self._state.default_headers:  # uvicorn makes a new list every second.
            self._update_default()
        parts = [STATUS_LINES[status], self._default_bytes]
        for name, value in fields:
            parts += (name, b": ", value, b"\r\n")
        if closing:
            if CLOSE not in fields:
                parts.append(b"connection: close\r\n")
        elif is_http_1_0:
            parts.append(b"connection: keep-alive\r\n")
        return parts

    def _update_default(self) -> None:
        self._default_fields = self._state.default_headers
        self._default_bytes = b"".join([b"%b: %b\r\n" % field for field in self._default_fields])
        self._success = STATUS_LINES[200] + self._default_bytes + b"content-type: application/octet-stream\r\nserver-timing: "

    def _write_pieces(self, pieces: list[bytes | memoryview]) -> None:
        """Write as much as the socket takes now, and have the transport write a copy of the rest.

        The transport takes pieces too, without a copy, but there is no notice when it has no more use for the slot's memory.
        """
        sent = 0
        if self._descriptor >= 0 and not self._transport.get_write_buffer_size():
            with suppress(OSError):  # The socket takes nothing now, or is broken, which the transport finds out as well.
                sent = os.writev(self._descriptor, pieces)
        rest = []
        for piece in pieces:
            if sent < len(piece):
                rest.append(memoryview(piece)[sent:])
                sent = 0
            else:
                sent -= len(piece)
        if rest:
            self._transport.write(b"".join(rest))
