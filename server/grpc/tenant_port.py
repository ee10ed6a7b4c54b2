"""What every call on a tenant's gRPC port passes: its connection, whose it is, its message, and how it is refused."""

import asyncio
import logging
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import ceil
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import EOF

from ..errors import (
    MOST_TEXT,
    Ambiguous,
    Answer,
    BadRequest,
    ClientGone,
    LimitExceeded,
    Misdirected,
    RequestError,
    TooLarge,
    TooSlow,
    code_of,
    refuse,
    shortened,
)
from ..protocol.json_document import short
from ..tenants import audit
from ..tenants.service import Service, Tenant, too_many_connections
from . import sockets
from .messages import MESSAGES
from .unread import KeptAnswers

log = logging.getLogger("greenlane")

MOST_UNSHOWN = 256
"""Open connections that have shown no call of the tenant's; where there are more, the oldest are closed."""
MOST_UNSHOWN_BYTES = 8 << 20
"""Bytes that such a connection may send: more than a call with a message, as far as that is let in before it is asked for."""
LOOK_INTERVAL = 1.0
"""Seconds between two looks."""


class Connections:
    """Those to one tenant's gRPC port: which have shown a call of the tenant's, and which are closed. gRPC accepts them itself,
    and says of none that it is open before a call comes. So the sockets of this process are looked at.

    Belongs to the event loop. `refuse` returns the error for a connection beyond the number that it is called with.
    """

    def __init__(self, port: int, refuse: Callable[[int], RequestError]) -> None:
        self._port = port
        self._refuse = refuse
        self._shown: set[sockets.Address] = set()
        self._open: dict[sockets.Address, None] = {}
        """Those of the last look that have shown nothing, oldest first."""
        self._cut: set[sockets.Address] = set()
        self._looking: asyncio.Task[None] | None = None

    @property
    def unshown(self) -> int:
        """How many have shown no call of the tenant's, as of the last look."""
        return len(self._open)

    def start(self) -> None:
        """Begin to look."""
        self._looking = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Look no more."""
        if self._looking:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking

    def show(self, peer: str, most: int | None) -> None:
        """A call of the tenant's has come from this peer, of whose connections `most` may be open.

        Raises what `refuse` returns.
        """
        client = sockets.address(peer)
        if client in self._shown:
            return
        if most is not None and len(self._shown) >= most:
            self._shown &= sockets.connections(self._port).keys()
            if len(self._shown) >= most:
                raise self._refuse(most)
        self._shown.add(client)
        self._open.pop(client, None)

    def cut(self, peer: str) -> None:
        """Close a connection at once, with all its calls and what it has sent that was not read."""
        client = sockets.address(peer)
        if client not in self._cut:
            self._cut.add(client)
            sockets.reset(self._port, (client,))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            known = self._shown | self._cut  # A connection that comes during the look may not be found by it.
            try:
                found = await asyncio.to_thread(sockets.connections, self._port)
                self._close_surplus(found, known - found.keys())
            except OSError as error:
                log.warning("the connections of gRPC's port %d cannot be looked at: %s", self._port, error)

    def _close_surplus(self, found: dict[sockets.Address, int], gone: set[sockets.Address]) -> None:
        """Given the bytes that each connection has sent, close those that show no call and are too many, or send too much."""
        self._shown -= gone
        self._cut -= gone
        known = [client for client in self._open if client in found and client not in self._shown]
        self._open = dict.fromkeys(known) | dict.fromkeys(client for client in found if client not in self._shown)
        ended = [client for client in self._open if found[client] > MOST_UNSHOWN_BYTES]
        ended += list(self._open)[: max(0, len(self._open) - MOST_UNSHOWN)]
        if ended:
            sockets.reset(self._port, ended)
            text = "%d connections to gRPC's port %d were closed that have shown no call of the tenant's"
            log.warning(text, len(ended), self._port)


MIN_READERS = 8
"""Messages that may arrive at a time at least, however large they may be."""
READ_SECONDS = 60.0
"""How long a message may take to arrive. gRPC does not say how much of it has arrived, so this cannot be a rate."""
CONTESTED_SECONDS = 5.0
"""The same for the oldest one while another waits for its place: silent clients must not lock others out."""
MAX_MESSAGE = 128 * 1024
"""Bytes of a message that is no inference; a configuration, the longest that such a message has, may have 64 KiB."""


class Refused(Exception):
    """A route of HTTP has answered with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.answer = Answer(status, code_of(status), text)


class TenantPort:
    """The gRPC port of one tenant. Belongs to the event loop.

    A message has no announced length, so its memory cannot be reserved: `readers` messages may arrive at a time, as many of the
    largest as the tenant's memory holds. What gRPC lets clients send of those that are not read yet is as much again at most.
    """

    def __init__(self, service: Service, name: str, calls: int) -> None:
        """`calls`: how many may be open at a time."""
        self.service = service
        self.name = name
        self.readers = max(MIN_READERS, service.config.tenants[name].memory // service.config.server.max_body)
        port = service.config.tenants[name].grpc_port
        assert port is not None
        self.kept = KeptAnswers(service.tenants[name].unread, port, calls // 2)
        self.connections = Connections(port, partial(too_many_connections, service.tenants[name]))
        self.reading = Places(self.readers)
        self._limits: dict[asyncio.Timeout, float] = {}  # Of the messages that arrive and may take their time, oldest first.

    def tenant(self, context: Any) -> Tenant:
        """The tenant of a call. Raises Unauthorized, Misdirected for another tenant than the port's, Ambiguous, and
        LimitExceeded for one more connection than the tenant may have.
        """
        metadata = context.invocation_metadata() or ()
        config = self.service.tenancy.identify(_single(metadata, "authorization"), _single(metadata, "x-tenant"))
        if config.name != self.name:
            where = f"on {config.grpc_port}, its own port" if config.grpc_port else "over HTTP; it has no grpc_port"
            raise Misdirected(f"this port belongs to tenant {self.name!r}; send requests of {config.name!r} {where}")
        tenant = self.service.tenants[self.name]
        self.connections.show(context.peer(), tenant.config.max_connections)
        return tenant

    def headers(self, context: Any) -> dict[str, str]:
        """The metadata of a call as headers, without what is binary. Raises Ambiguous."""
        metadata = context.invocation_metadata() or ()
        for name in ("authorization", "x-tenant"):
            _single(metadata, name)
        return {name: value for name, value in metadata if isinstance(value, str)}

    def traceparent(self, context: Any) -> str | None:
        """The header of this name of a call, if the tenant is traced."""
        if self.service.tenants[self.name].tracing.sampler is None:
            return None
        return next((value for name, value in context.invocation_metadata() or () if name == "traceparent"), None)

    async def read(self, context: Any) -> bytes:
        """The message of a call that has one. Raises TooSlow, BadRequest."""
        if self.reading.full:
            self._hurry_oldest()
        await self.reading.take(context)
        if self.reading.wanted:
            self._hurry_oldest()
        begun = asyncio.get_running_loop().time()
        limit = asyncio.timeout(READ_SECONDS)
        self._limits[limit] = begun
        try:
            async with limit:
                message = await context.read()
        except TimeoutError:
            waited = asyncio.get_running_loop().time() - begun
            raise TooSlow(f"the message did not come within {waited:.3g} s") from None
        finally:
            self._limits.pop(limit, None)
            self.reading.give()
        if message is EOF:
            raise BadRequest("there is no message; expected one")
        data: bytes = message
        return data

    async def request(self, context: Any, kind: str) -> Any:
        """The message of a call other than an inference, of this kind. Raises as `read` does, and TooLarge.

        Some need no key, and a message of many fields would hold up the event loop for seconds.
        """
        data = await self.read(context)
        if len(data) > MAX_MESSAGE:
            text = f"the message is a {kind} of {len(data)} bytes; the limit is {MAX_MESSAGE}"
            raise TooLarge(f"{text}. Put files into the model repository")
        try:
            message = MESSAGES[kind].FromString(data)
        except DecodeError as error:
            raise BadRequest(f"the message is no {kind}: {error}") from error
        if other := getattr(message, "repository_name", ""):
            raise BadRequest(f"repository_name: {short(other)!r}; expected none, as there is one repository")
        return message

    def _hurry_oldest(self) -> None:
        """Give the oldest of the messages that arrive less time, as another waits for its place."""
        if self._limits:
            limit = next(iter(self._limits))
            due = self._limits.pop(limit) + CONTESTED_SECONDS
            limit.reschedule(max(due, asyncio.get_running_loop().time()))

    async def refuse(self, context: Any, error: Exception) -> NoReturn:
        """End a call with an error."""
        if isinstance(error, ClientGone):
            raise CancelledError  # gRPC expects it of a call that its client has ended, and answers nothing.
        given = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        audit.refused(error, "gRPC", self.name, sockets.address(context.peer()), given[0] if given else None)
        answer = error.answer if isinstance(error, Refused) else refuse(error, self.name)
        if isinstance(error, LimitExceeded):  # Clients with a retry policy wait for so many milliseconds.
            context.set_trailing_metadata((("grpc-retry-pushback-ms", str(ceil(1000 * error.retry_after))),))
        kept = self.kept.keep(context, MOST_TEXT)
        try:
            await context.abort(grpc.StatusCode[answer.code], shortened(answer.text))
        finally:
            kept.done()
        raise error


def _single(metadata: Any, key: str) -> str | None:
    values = [value for name, value in metadata if name == key]
    if len(values) > 1:
        raise Ambiguous(f"{key.title()}: given {len(values)} times; expected once")
    return values[0] if values else None


class Places:
    """So many places. Belongs to the event loop.

    A connection with hundreds of calls waits behind itself: each connection that waits gets a place in its turn.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The calls that wait, by connection; the one whose turn it is first."""

    @property
    def full(self) -> bool:
        """Whether the next call has to wait."""
        return not self._free

    @property
    def wanted(self) -> bool:
        """Whether calls wait."""
        return bool(self._waiting)

    async def take(self, context: Any) -> None:
        """Wait for a place for this call; it is to be given back by `give`."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(context.peer(), deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give()
            raise

    def give(self) -> None:
        """Give a place back, or to the next call that waits."""
        while self._waiting:
            peer = next(iter(self._waiting))
            calls = self._waiting.pop(peer)
            turn = calls.popleft()
            if calls:
                self._waiting[peer] = calls
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
