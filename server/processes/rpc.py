"""Questions and notes between two processes of one server, over a socket: pickled, for they trust each other."""

import asyncio
import logging
import pickle
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from ..errors import Failed, Unavailable

log = logging.getLogger("greenlane.processes")

_CANCEL = ""
"""The name of the note that a question is asked no more; no handler is called so."""
_LENGTH = 4
_GONE = "the other process is gone"


class Message(NamedTuple):
    """A question or a note (number 0) with a name and its arguments, or the answer to the question of this number."""

    number: int
    name: str | None
    content: Any


class Channel:
    """One end. `handlers` by name are called, and awaited if need be, for what the other end says.

    Belongs to the event loop. Notes are handled in the order in which they were sent, and before later questions. A question
    whose future is cancelled is cancelled at the other end.
    """

    def __init__(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        self.closed = asyncio.Event()
        self._handlers = handlers
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._running: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Channel {len(self._asked)} asked, {len(self._answering)} to answer{', closed' * self.closed.is_set()}>"

    async def open(self, end: socket.socket) -> None:
        """Speak over this socket, which is the channel's from here on."""
        reader, self._writer = await asyncio.open_connection(sock=end)
        self._running = asyncio.create_task(self._run(reader))

    def notify(self, name: str, *arguments: Any) -> None:
        """Send a notification. It is lost if the other process is gone."""
        self._send(Message(0, name, arguments))

    def call(self, name: str, *arguments: Any) -> "asyncio.Future[Any]":
        """Ask something, which is said when this returns.

        The future raises Unavailable if the other end goes away before it answers, Failed if it could not.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.closed.is_set() or self._writer is None:
            answer.set_exception(Unavailable(_GONE))
            return answer
        number = next(self._numbers)
        self._send(Message(number, name, arguments))
        self._asked[number] = answer
        answer.add_done_callback(partial(self._answered, number))
        return answer

    def close(self) -> None:
        """Hang up."""
        if self._running:
            self._running.cancel()
        self._end()

    def _answered(self, number: int, answer: "asyncio.Future[Any]") -> None:
        self._asked.pop(number, None)
        if answer.cancelled():
            self.notify(_CANCEL, number)

    def _send(self, message: Message) -> None:
        if self._writer and not self._writer.is_closing():  # It is, before `closed` says so, when a write has failed.
            data = pickle.dumps(tuple(message))
            self._writer.write(len(data).to_bytes(_LENGTH, "little") + data)

    async def _run(self, reader: asyncio.StreamReader) -> None:
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    length = int.from_bytes(await reader.readexactly(_LENGTH), "little")
                    self._hear(Message._make(pickle.loads(await reader.readexactly(length))))
        except Exception:
            log.exception("what came from another process makes no sense; hanging up on it")
        finally:
            self._end()

    def _hear(self, message: Message) -> None:
        if message.name is None:
            if (answer := self._asked.get(message.number)) and not answer.done():
                _settle(answer, *message.content)
        elif message.number:
            task = asyncio.ensure_future(self._answer(message.number, message.name, message.content))
            self._answering[message.number] = task
            task.add_done_callback(lambda _: self._answering.pop(message.number))
        elif message.name == _CANCEL:
            if answering := self._answering.get(*message.content):
                answering.cancel()
        else:
            self._take_note(partial(self._handlers[message.name], *message.content))

    def _take_note(self, handle: Callable[[], Any]) -> None:
        try:
            handle()
        except Exception:
            log.exception("what another process said could not be done")

    async def _answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            found = self._handlers[name](*arguments)
            self._send(Message(number, None, (True, await found if asyncio.iscoroutine(found) else found)))
        except Exception as error:
            self._send(Message(number, None, (False, f"{type(error).__name__}: {error}")))

    def _end(self) -> None:
        self.closed.set()
        if self._writer:
            self._writer.close()
        for answer in list(self._asked.values()):
            if not answer.done():
                answer.set_exception(Unavailable(_GONE))


def _settle(answer: "asyncio.Future[Any]", well: bool, content: Any) -> None:
    if well:
        answer.set_result(content)
    else:
        answer.set_exception(Failed(content))
