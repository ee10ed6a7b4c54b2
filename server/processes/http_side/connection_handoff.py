"""Takes connections from the dispatcher, and gives back those whose next request is for another process.

Some are uvicorn's: its server is here as HTTP processes run it, without signals, and with 401 answers that wait for their turn.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from typing import Any

import uvicorn

from ...config.schema import Config
from ...http.asgi import Application
from ...http.connection_limits import Refusals
from ...http.exchange import Message, Receive, Send
from ...http.head import Head
from ...http.paths import is_shared
from ...scheduling.limits import TokenBucket
from ...tenants.service import Service
from ..channels import handoff
from ..channels.handoff import Handoff
from ..channels.routing import process_for

MAX_WAITING = 256
"""Answers that wait at a time; the rest are sent at once, as such connections cannot be closed."""


class Server(uvicorn.Server):
    """uvicorn that leaves signals alone: `should_exit` is set by other means."""

    def capture_signals(self) -> Any:
        return nullcontext()


class Paced:
    """An ASGI application whose 401 answers wait, for the connections that uvicorn answers: it reads little meanwhile."""

    def __init__(self, application: Application, refusals: Refusals) -> None:
        self._application = application
        self._refusals = refusals
        self._waiting = 0

    def __repr__(self) -> str:
        return f"<Paced, {self._waiting} answers wait>"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def paced(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401 and self._waiting < MAX_WAITING:
                self._waiting += 1
                try:
                    await asyncio.sleep(self._refusals.wait())
                finally:
                    self._waiting -= 1
            await send(message)

        await self._application(scope, receive, paced)


_MAX_ACCEPTS = 16
"""Connections taken from the dispatcher in one iteration of the event loop."""


class ReplayProtocol(asyncio.Protocol):
    """Gives the real protocol the bytes that another process read from its connection, before any that come later."""

    def __init__(self, protocol: asyncio.Protocol, data: bytes) -> None:
        self._protocol = protocol
        self._data = data

    def connection_made(self, transport: Any) -> None:
        transport.set_protocol(self._protocol)
        self._protocol.connection_made(transport)
        self._protocol.data_received(self._data)


class ConnectionHandoff:
    """The connections of one HTTP process. Belongs to the event loop.

    `end` is this process's end of the socket to the dispatcher, `name` that of the process. `service` returns what says whose a
    request is. `server` serves the connections; `spawn` runs a task. With `pace` no more connections are taken than it allows:
    the others wait at the dispatcher.
    """

    def __init__(
        self,
        end: socket.socket,
        name: str,
        service: Callable[[], Service],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        pace: TokenBucket | None = None,
    ) -> None:
        self.server: Server
        self.ports: set[int] = set()
        """The ports by which connections have come."""
        self._owners: dict[int, str] = {}
        """Tenants by their own ports, those that have gone too."""
        self._end = end
        self._name = name
        self._service = service
        self._spawn = spawn
        self._pace = pace

    def open(self, server: Server) -> None:
        """Take connections from now on; this server serves them."""
        self.server = server
        self._end.setblocking(False)
        self._watch()

    def learn(self, config: Config) -> None:
        """These are the tenants from now on."""
        self._owners |= {tenant.port: name for name, tenant in config.tenants.items() if tenant.port is not None}

    def take_all(self) -> None:
        """Take all connections that were already handed over."""
        with suppress(BlockingIOError):
            while self._receive_next():
                pass

    def give_back(self, head: Head, transport: Any, data: bytes | bytearray) -> bool | None:
        """Give a connection back to the dispatcher if its next request is for another process; whether it was given back.

        None if it cannot be given back yet: answers are not sent, or the dispatcher takes no more at the moment. `data` is what
        was read of that request.
        """
        service = self._service()
        name = head.tenant = process_for(head.path, head.headers, service.tenancy)
        if name == self._name or not self._may_pass_to(name, head, transport):
            return False
        if transport.get_write_buffer_size():
            return None
        try:
            self._send(name, transport, data)
        except BlockingIOError:
            return None
        except OSError:
            return False
        return True

    def _watch(self) -> None:
        asyncio.get_running_loop().add_reader(self._end.fileno(), self._on_handoff)

    def _on_handoff(self) -> None:
        """Connections have arrived, or the dispatcher has ended."""
        with suppress(BlockingIOError):
            for _ in range(_MAX_ACCEPTS):
                if self._pace and (wait := self._pace.wait(1, time.monotonic_ns() // 1000)):
                    asyncio.get_running_loop().remove_reader(self._end.fileno())
                    asyncio.get_running_loop().call_later(wait / 1e6, self._watch)
                    return
                if not self._receive_next():
                    asyncio.get_running_loop().remove_reader(self._end.fileno())
                    return
                if self._pace:
                    self._pace.take(1)

    def _receive_next(self) -> bool:
        """Take one connection; False once the dispatcher is gone. Raises BlockingIOError if there is none now."""
        received = handoff.receive(self._end)
        if received:
            with suppress(OSError):
                self.ports.add(received.connection.getsockname()[1])
            self._spawn(self._serve(received))
        return received is not None

    async def _serve(self, received: Handoff) -> None:
        try:
            await self._serve_connection(received)
        finally:
            if received.read_ahead is not None:
                os.close(received.read_ahead)

    async def _serve_connection(self, received: Handoff) -> None:
        """Have uvicorn serve this connection; returns once it is set up."""
        data, server = received.data(), self.server

        def make() -> asyncio.Protocol:
            kind: Any = server.config.http_protocol_class
            protocol: asyncio.Protocol = kind(config=server.config, server_state=server.server_state, app_state={})
            return ReplayProtocol(protocol, data) if data else protocol

        with suppress(OSError):  # The client has disconnected.
            await asyncio.get_running_loop().connect_accepted_socket(make, received.connection)

    def _may_pass_to(self, name: str, head: Head, transport: Any) -> bool:
        """Whether a connection may move to this process: to a tenant's, for administration to the shared one, and from that to
        any. One that came by a tenant's own port moves for administration only, and back.

        A client that can reach one tenant's port may not be permitted to reach the other tenants. A call that takes a tenant
        away, and what waits for that, is answered when that tenant's process has ended.
        """
        if owner := self._owners.get(transport.get_extra_info("sockname")[1]):
            return name == owner or is_shared(head.path)
        service = self._service()
        return not service.tenants or name in service.tenancy.tenants or is_shared(head.path)

    def _send(self, name: str, transport: Any, data: bytes | bytearray) -> None:
        read_ahead = handoff.memory_file(bytes(data))
        try:
            handoff.send(self._end, Handoff(name, transport.get_extra_info("socket"), read_ahead))
        finally:
            os.close(read_ahead)
