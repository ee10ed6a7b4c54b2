"""Calls and notifications between the supervisor and one other process, over a socket.

HTTP processes parse bytes of untrusted clients. So what they send is decoded into the types of the arguments of the channel's
handlers and nothing else: no pickles. Whatever does not decode is logged and closes the channel; the process is replaced then.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple

import msgspec

from partitions import DeviceLost, DeviceUnavailable, DoesNotFit, Misplaced, PartitionError, Unsupported

from ...config.tables import ConfigError
from ...errors import BadRequest, Conflict, Failed, NotFound, QueueFull, Unavailable
from .message_fields import decode_hook, encode_hook

log = logging.getLogger("greenlane.processes")

MAX_MESSAGE = 64 << 20
"""Bytes of one message. The largest are label files of a model, and requests and answers of the admin API, some MiB."""
MOST_CALLS = 100
"""Bounded calls of the other process that are answered at once: many more than clients load models or look at once."""
MOST_BYTES = 2 * MAX_MESSAGE
"""Bytes of these calls."""
_MOST_UNREAD = MAX_MESSAGE
"""Bytes sent to the other process that it has not read, above which no more such calls are answered."""
_MOST_REFUSED = 10_000
"""Bounded calls that are refused in a row, while the process does not read what was sent to it, before it is distrusted."""
_LENGTH = 4
"""Bytes before each message, little-endian: its length."""
_KINDS: Final = {
    kind.__name__: kind
    for kind in (
        BadRequest,
        Conflict,
        DeviceLost,
        DeviceUnavailable,
        DoesNotFit,
        Failed,
        Misplaced,
        NotFound,
        PartitionError,
        QueueFull,
        Unavailable,
        Unsupported,
    )
}
"""Errors that arrive at the other end as what they were; they are made of their text alone."""


class Malformed(Exception):
    """The other process sent something that it may not send. Handlers may raise it."""


class Handler(NamedTuple):
    """What answers calls of one method, or notifications if they are not `awaited`: `run` gets the decoded arguments.

    `bounded`: over `MOST_CALLS` and `MOST_BYTES` calls are refused by QueueFull, for a process that may have been taken over.
    """

    arguments: msgspec.msgpack.Decoder[tuple[Any, ...]]
    awaited: bool
    run: Callable[..., Any]
    bounded: bool = False


Handlers = dict[str, Handler]
"""By the names of methods."""


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """On the wire an array of its tag and its fields."""


class _Call(Message, tag="call"):
    number: int | None
    """None for a notification."""
    method: str
    arguments: msgspec.Raw


class _Result(Message, tag="result"):
    number: int
    value: msgspec.Raw


class _Failure(Message, tag="failure"):
    number: int
    kind: str
    text: str


class _Cancellation(Message, tag="cancel"):
    number: int


_Frame = _Call | _Result | _Failure | _Cancellation

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)
_frames: msgspec.msgpack.Decoder[_Frame] = msgspec.msgpack.Decoder(_Frame)


class _PendingCall(NamedTuple):
    answer: "asyncio.Future[Any]"
    result: Any


class Channel:
    """One end. `handlers` are what the other end may call.

    Belongs to the event loop. Messages are handled in the order in which they were sent: a notification is done before the
    next message is looked at, a call is begun. Cancelling the future of a call cancels its handler at the other end. `peer`
    is what the log calls the other process.
    """

    def __init__(self, peer: str, handlers: Handlers) -> None:
        self.closed = asyncio.Event()
        self.distrusted = False
        """It was closed because the other process sent what it may not send: that process is to be killed."""
        self._peer = peer
        self._handlers = handlers
        self._numbers = count(1)
        self._calls: dict[int, _PendingCall] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._held: dict[int, int] = {}
        """The bytes of those of them that are bounded."""
        self._refused = 0
        self._socket: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._running: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = ", closed" * self.closed.is_set()
        return f"<Channel to {self._peer}, {len(self._calls)} calls, {len(self._answering)} to answer{state}>"

    async def open(self, end: socket.socket) -> None:
        """Use this socket, which belongs to the channel from here on."""
        self._socket = end
        reader, self._writer = await asyncio.open_connection(sock=end)
        self._running = asyncio.create_task(self._run(reader))

    def notify(self, method: str, arguments: Sequence[Any]) -> None:
        """Send a notification. It is lost if the other process is gone. Raises ValueError over MAX_MESSAGE."""
        self._write(_pack(_Call(None, method, _raw(arguments))))

    def call(self, method: str, arguments: Sequence[Any], result: Any) -> "asyncio.Future[Any]":
        """Send a call, at once, and return the future of its answer, which is decoded as a `result`.

        The future raises Unavailable if the other process ends before it answers, and what its handler raised.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.closed.is_set() or self._writer is None:
            answer.set_exception(self._gone())
            return answer
        number = next(self._numbers)
        try:
            data = _pack(_Call(number, method, _raw(arguments)))
        except ValueError as error:
            answer.set_exception(Failed(str(error)))
            return answer
        self._write(data)
        self._calls[number] = _PendingCall(answer, result)
        answer.add_done_callback(partial(self._on_answer, number))
        return answer

    def close(self) -> None:
        """Close the socket. Calls that are not answered raise Unavailable."""
        if self._running:
            self._running.cancel()
        self._end()

    def finish(self) -> None:
        """Handle what the other process has sent, then close the socket: it has ended, and sends nothing more."""
        if self._socket:
            with suppress(OSError):  # It is closed already.
                self._socket.shutdown(socket.SHUT_RDWR)

    def distrust(self) -> None:
        """Close the socket, as what the other process did elsewhere shows that it is not what it should be."""
        self.distrusted = True
        self.close()

    def _on_answer(self, number: int, answer: "asyncio.Future[Any]") -> None:
        self._calls.pop(number, None)
        if answer.cancelled():
            self._write(_pack(_Cancellation(number)))

    def _write(self, data: bytes) -> None:
        if self._writer and not self._writer.is_closing():  # It is, before `closed` is set, when a write has failed.
            self._writer.write(data)

    async def _run(self, reader: asyncio.StreamReader) -> None:
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    length = int.from_bytes(await reader.readexactly(_LENGTH), "little")
                    if length > MAX_MESSAGE:
                        raise Malformed(f"a message of {length} bytes; at most {MAX_MESSAGE}")
                    self._handle(_frames.decode(await reader.readexactly(length)))
        except (msgspec.MsgspecError, Malformed, RecursionError) as error:
            self.distrusted = True
            log.error("malformed message from %s; closing its channel: %s", self._peer, error)
        except Exception:
            log.exception("unexpected error on the channel to %s; closing it", self._peer)
        finally:
            self._end()

    def _handle(self, frame: _Frame) -> None:
        """Raises MsgspecError or Malformed."""
        if isinstance(frame, _Call):
            self._handle_call(frame.number, frame.method, frame.arguments)
        elif isinstance(frame, _Cancellation):
            if answering := self._answering.get(frame.number):
                answering.cancel()
        elif (pending := self._calls.get(frame.number)) and not pending.answer.done():
            if isinstance(frame, _Result):
                pending.answer.set_result(msgspec.msgpack.decode(frame.value, type=pending.result, dec_hook=decode_hook))
            else:
                pending.answer.set_exception(_rebuild(frame.kind, frame.text))

    def _handle_call(self, number: int | None, method: str, arguments: msgspec.Raw) -> None:
        handler = self._handlers.get(method)
        if handler is None or handler.awaited == (number is None):
            raise Malformed(f"{'a notification' if number is None else 'a call'} of {method!r}, which it may not make")
        if number is None:
            self._notified(partial(handler.run, *handler.arguments.decode(arguments)))
            return
        if number in self._answering:
            raise Malformed(f"a call of {method!r} with the number {number} of one that is not answered yet")
        if handler.bounded:
            size = len(memoryview(arguments))
            try:
                self._check_room(size)
            except QueueFull as error:
                self._refuse(number, error)
                return
            self._held[number] = size
        run = partial(handler.run, *handler.arguments.decode(arguments))
        self._answering[number] = task = asyncio.ensure_future(self._answer(number, run))
        task.add_done_callback(lambda _: self._answered(number))

    def _answered(self, number: int) -> None:
        self._answering.pop(number, None)
        self._held.pop(number, None)

    def _check_room(self, size: int) -> None:
        """Raise QueueFull if a bounded call of so many bytes is one too many."""
        self._check_read()
        count, nbytes = len(self._held) + 1, sum(self._held.values()) + size
        if count > MOST_CALLS or nbytes > MOST_BYTES:
            raise QueueFull(
                f"{count} requests with {nbytes} bytes in all have come to the supervisor by this process at once; at most "
                f"{MOST_CALLS} with {MOST_BYTES} bytes are answered. Send this one again when others were answered"
            )

    def _check_read(self) -> None:
        """Raise QueueFull if the other process leaves too much unread."""
        if (unread := self.unread) > _MOST_UNREAD:
            raise QueueFull(
                f"this process has not read {unread} bytes that the supervisor has sent; with more than {_MOST_UNREAD} "
                "nothing is answered. Send it again when it has"
            )

    def _refuse(self, number: int, error: QueueFull) -> None:
        self._refused = self._refused + 1 if self.unread else 0
        if self._refused > _MOST_REFUSED:
            raise Malformed(f"{self._refused} calls too many, whose answers it does not read")
        self._write(_pack(_Failure(number, *_describe(error))))

    @property
    def unread(self) -> int:
        """Bytes that the other process has not read, as far as they are not in the socket."""
        return self._writer.transport.get_write_buffer_size() if self._writer else 0

    def _notified(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except Malformed:
            raise
        except Exception:
            log.exception("a notification from %s failed", self._peer)

    async def _answer(self, number: int, run: Callable[[], Any]) -> None:
        try:
            result = await run()
            if number in self._held:
                self._check_read()
            data = _pack(_Result(number, _raw(result)))
        except Exception as error:
            data = _pack(_Failure(number, *_describe(error)))
        self._write(data)

    def _gone(self) -> Unavailable:
        return Unavailable(f"{self._peer} has ended, and did not answer; send it again, if it may be done twice")

    def _end(self) -> None:
        self.closed.set()
        if self._writer:
            self._writer.close()
        for pending in list(self._calls.values()):
            if not pending.answer.done():
                pending.answer.set_exception(self._gone())


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(value))


def _pack(frame: _Frame) -> bytes:
    """A frame and its length. Raises ValueError over MAX_MESSAGE."""
    data = _encoder.encode(frame)
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE}")
    return len(data).to_bytes(_LENGTH, "little") + data


def _describe(error: Exception) -> tuple[str, str]:
    """The name of the error's class and its text."""
    return type(error).__name__, str(error)


def _rebuild(kind: str, text: str) -> Exception:
    """The error again; one of another class becomes Failed, with its name in the text."""
    if kind == ConfigError.__name__:
        return ConfigError(text.split("\n"))
    known = _KINDS.get(kind)
    return known(text) if known else Failed(f"{kind}: {text}")
