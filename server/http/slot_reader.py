"""Receives the tensors of large requests straight into their slots, which asyncio calls a buffered protocol.

An ordinary protocol gets its bytes in pieces of up to 250 KB: uvloop copies them out of a buffer of its own, the connection
joins them, and the tensors are copied into the slot. A buffered protocol says before each `recv` where the bytes are to go. It
costs a call more for each, so a connection reads this way only from its first large request on.
"""

import asyncio
from typing import Any, Protocol

from ..protocol.arriving_body import ArrivingBody
from .head import Head
from .inference import HttpInference

_SCRATCH_BYTES = 16 * 1024


class Receiver(Protocol):
    """The connection that receives; its other methods are those of `asyncio.Protocol`."""

    def data_received(self, data: bytes) -> None: ...
    def body_received(self, body: ArrivingBody) -> None: ...
    def leave_slot(self, received: bytearray) -> None: ...
    def eof_received(self) -> bool: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class SlotReader(asyncio.BufferedProtocol):
    """The transport's protocol while `active`: receives into the slot of `body`; what is not tensors goes to the connection."""

    def __init__(self, connection: Receiver, transport: Any) -> None:
        self.body: ArrivingBody | None = None
        self.active = False
        self._connection = connection
        self._transport = transport
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._before_tensors = self._expected = 0
        """How many bytes come before the next tensors, 0 if that is unknown, and in the request that is expected. No more are
        received in one piece: what came behind them would have to be copied."""

    def expect(self, head: Head) -> None:
        """Receive for the connection from now on. The client is expected to send the same head and JSON again."""
        self._before_tensors = self._expected = len(head.data) + head.tensors_at
        if not self.active:
            self.active = True
            self._transport.set_protocol(self)

    def place(self, head: Head, data: bytearray, begin: int, inference: HttpInference) -> bool:
        """Receive into a slot from now on; False if there is none for this request, or its JSON is not complete yet.

        `data` is what has arrived, from `begin` on of the body. If the JSON is incomplete, call this again with more.
        """
        start = begin + head.tensors_at
        self._before_tensors = max(0, start - len(data))
        if self._before_tensors:
            return False
        with memoryview(data) as view:
            self.body = inference.receive(bytes(view[begin:start]), head.length, self._leave)
            if self.body is not None:
                self.body.write(view[start:])
        if self.body is None:
            self.stop()
        return self.body is not None

    def stop(self) -> None:
        """Have the connection receive by itself, until the next `expect`."""
        self.body = None
        if self.active:
            self.active = False
            self._transport.set_protocol(self._connection)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.body is not None:
            return self.body.buffer()
        return self._scratch[: self._before_tensors] if self._before_tensors else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        body = self.body
        if body is not None:
            body.advance(nbytes)
            if body.complete:
                self.body, self._before_tensors = None, self._expected
                self._connection.body_received(body)
        else:
            self._before_tensors = 0
            self._connection.data_received(bytes(self._scratch[:nbytes]))

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def _leave(self) -> None:
        body = self.body
        if body is not None:
            self._connection.leave_slot(body.copy())
            self.stop()
