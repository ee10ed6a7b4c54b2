"""The process of one front: connections come through its door, tickets go out over its link."""

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import uvicorn
import uvloop

from ..api import cors, docs, framework, metadata, model_control
from ..config.schema import Config
from ..host.malloc import QUIET, Tidy, keep_large_blocks
from ..http.connection import HttpConnection
from ..http.connection_limits import MAX_SHARED_CONNECTIONS, Connections, descriptor_limit
from ..http.head import Head
from ..http.infer import Infer
from ..http.paths import is_infer
from ..link import ring as links
from ..link.ring import Descriptors
from ..tenants.catalog import Entry, Served
from ..tenants.frontend import Report, State
from ..tenants.service import Service, Tenant, open_tenant, publish, report
from . import handoff as door
from . import proxy
from .handoff import Passed
from .process_setup import begin
from .proxy import Forwarded
from .routing import SHARED, UNAUTHENTICATED, belongs
from .rpc import Channel

log = logging.getLogger("greenlane.processes")

_AT_ONCE = 16
_NICE = 10
_LEAST_KEPT = 5
"""Seconds for which a connection that showed no tenant may say nothing."""


@dataclass(frozen=True, slots=True)
class Outfit:
    """What a front's process is given: whose it is, its door, its channel, and a tenant's link and own port's sockets."""

    name: str
    config: Config
    door: socket.socket
    channel: socket.socket
    link: Descriptors | None
    listeners: list[socket.socket]


class Resumed(asyncio.Protocol):
    """Goes before another protocol and shows it what was read from its connection earlier, before there can be more."""

    def __init__(self, protocol: asyncio.Protocol, data: bytes) -> None:
        self._protocol = protocol
        self._data = data

    def connection_made(self, transport: Any) -> None:
        transport.set_protocol(self._protocol)
        self._protocol.connection_made(transport)
        self._protocol.data_received(self._data)


class Server(uvicorn.Server):
    """uvicorn, whose connections are brought to it, and which is told over the channel when to end."""

    def capture_signals(self) -> Any:
        return nullcontext()

    async def take(self, passed: Passed) -> None:
        """Serve this connection."""
        data = passed.data()

        def make() -> asyncio.Protocol:
            kind: Any = self.config.http_protocol_class
            protocol: asyncio.Protocol = kind(config=self.config, server_state=self.server_state, app_state={})
            return Resumed(protocol, data) if data else protocol

        with suppress(OSError):  # The client hung up already.
            await asyncio.get_running_loop().connect_accepted_socket(make, passed.connection)


class Process:
    """One front at work; see `server.tenants.frontend.Desk` for what the other end of its channel may say."""

    def __init__(self, outfit: Outfit) -> None:
        self._outfit = outfit
        self._channel = Channel(
            {
                "announce": self._announce,
                "publish": self._publish,
                "place": self._place,
                "become": self._become,
                "beat": self._beat,
                "refuse": self._refuse,
                "suspend": self._suspend,
                "report": self._report,
                "empty": self._empty,
                "leave": self._leave,
            }
        )
        self._tenant: Tenant | None = None
        self._service = Service(outfit.config, [])
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = Server(self._uvicorn())
        if outfit.name in (SHARED, UNAUTHENTICATED):
            self._server.server_state.connections = Connections(min(MAX_SHARED_CONNECTIONS, descriptor_limit()))  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Process of {self._outfit.name}, {self._service!r}>"

    async def run(self) -> None:
        """Serve until told to leave, or nobody is there any more to tell it."""
        outfit, loop = self._outfit, asyncio.get_running_loop()
        if outfit.link:
            self._tenant = open_tenant(outfit.config.tenants[outfit.name], links.attach(outfit.link), self)
            self._tenant.lane.open(loop)
            self._service = Service(outfit.config, [self._tenant])
            self._spawn(self._tidy(self._tenant))
        await self._channel.open(outfit.channel)
        outfit.door.setblocking(False)
        loop.add_reader(outfit.door.fileno(), self._on_door)
        self._spawn(self._outlive())
        await self._server.serve(outfit.listeners)

    def cancel(self, slot: int, serial: int) -> None:
        self._channel.tell("cancel", slot, serial)

    def _uvicorn(self) -> uvicorn.Config:
        infer = Infer(lambda: self._service)
        application = framework.build(
            (metadata.router, model_control.router, docs.router, proxy.router),
            service=lambda: self._service,
            ask=self._ask,
            model_control=proxy.RemoteModelControl(self._ask),
        )

        async def everything(scope: Any, receive: Any, send: Any) -> None:
            await (infer if is_infer(scope["path"]) else application)(scope, receive, send)

        shared = cors.allow(everything, self._outfit.config.server.cors_origins)
        return uvicorn.Config(
            shared,
            loop="uvloop",
            lifespan="off",
            ws="none",
            http=partial(HttpConnection, infer, shared, self._hand_off),  # type: ignore[arg-type]
            timeout_keep_alive=self._keep_alive(),
            log_config=None,
            access_log=False,
            server_header=False,
        )

    def _keep_alive(self) -> int:
        seconds = ceil(self._outfit.config.server.keep_alive)
        return min(seconds, _LEAST_KEPT) if self._outfit.name in (SHARED, UNAUTHENTICATED) else seconds

    async def _ask(self, asked: Forwarded) -> Any:
        return await self._channel.ask("forward", asked)

    async def _outlive(self) -> None:
        """End with the process that started this one."""
        await self._channel.closed.wait()
        os._exit(1)

    def _on_door(self) -> None:
        """Connections arrived, or nobody is at the other end."""
        with suppress(BlockingIOError):
            for _ in range(_AT_ONCE):
                if not self._take_next():
                    asyncio.get_running_loop().remove_reader(self._outfit.door.fileno())
                    return

    def _take_next(self) -> bool:
        """Take one connection; False once none will come. Raises BlockingIOError if there is none now."""
        passed = door.take(self._outfit.door)
        if passed:
            self._spawn(self._take(passed))
        return passed is not None

    async def _take(self, passed: Passed) -> None:
        try:
            await self._server.take(passed)
        finally:
            if passed.ahead is not None:
                os.close(passed.ahead)

    def _hand_off(self, head: Head, transport: Any, data: bytes | bytearray) -> bool:
        """Give a connection back to the dispatcher once it asks for something that is another process's.

        A head that was answered once is ours.
        """
        if head.target is not None or transport.get_write_buffer_size():
            return False
        where = belongs(head.path, head.headers.get(b"authorization"), head.headers.get(b"x-tenant"), self._service.tenancy)
        if where == self._outfit.name or (self._tenant and not self._may_go(where, transport)):
            return False
        try:
            self._give_back(where, transport, data)
        except OSError:
            return False
        return True

    def _may_go(self, where: str, transport: Any) -> bool:
        """Whether a tenant's connection may become this one's: another tenant's, unless it came by the tenant's own port.

        Who may reach one tenant's port may not therefore reach the others.
        """
        own = self._outfit.config.tenants[self._outfit.name].port
        return where in self._service.tenancy.tenants and transport.get_extra_info("sockname")[1] != own

    def _give_back(self, where: str, transport: Any, data: bytes | bytearray) -> None:
        ahead = door.write_down(bytes(data))
        try:
            door.give(self._outfit.door, Passed(where, transport.get_extra_info("socket"), ahead))
        finally:
            os.close(ahead)

    async def _tidy(self, tenant: Tenant) -> None:
        """Give back, while nothing is asked, what large bodies and answers took."""
        tidy = Tidy(lambda: (tenant.uploads.counted, *(served.statistics.last for served in tenant.catalog.served())))
        while True:
            await asyncio.sleep(QUIET)
            tidy.look()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a connection could not be taken: %s", error, exc_info=error)

    def _announce(self, name: str) -> None:
        if self._tenant:
            self._tenant.catalog.announce(name)

    async def _publish(self, name: str, served: list[Served], problems: list[Entry]) -> bool:
        if self._tenant:
            await publish(self._tenant, name, served, problems)
        return True

    def _place(self, cores: frozenset[int]) -> None:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            log.warning("the HTTP process cannot run on cores %s: %s", sorted(cores), error.strerror)

    def _become(self, state: State) -> None:
        loaded = self._service.state == "starting" and state in ("serving", "incomplete")
        self._service.become(state)
        if loaded:
            gc.collect()
            gc.freeze()

    def _beat(self) -> None:
        self._service.heard()
        self._channel.tell("turns")

    def _refuse(self, reason: str) -> None:
        if self._tenant:
            self._tenant.refuse(reason)

    def _suspend(self, reason: str) -> None:
        if self._tenant:
            self._tenant.suspend(reason)

    def _report(self) -> Report:
        assert self._tenant, "only tenants are asked for reports"
        return report(self._tenant)

    async def _empty(self) -> None:
        if self._tenant:
            await self._tenant.lane.empty()

    def _leave(self) -> None:
        """End once what was brought is answered; nobody brings more."""
        with suppress(BlockingIOError):
            while self._take_next():
                pass
        self._server.should_exit = True


def main(outfit: Outfit) -> None:
    """The process."""
    begin(outfit.name, outfit.config)
    keep_large_blocks()
    if outfit.name in (SHARED, UNAUTHENTICATED):
        os.nice(_NICE)  # What is nobody's comes after what is somebody's.
    uvloop.run(Process(outfit).run())
    sys.exit(0)
