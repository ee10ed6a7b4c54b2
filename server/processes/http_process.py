"""One HTTP process: takes connections from the dispatcher, sends tickets over its tenant's link, and answers."""

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
import uvloop

from ..api import cors, docs, framework, metadata, model_control, status_page, text, trace_settings
from ..config.schema import Config
from ..host import logs
from ..host.malloc import QUIET, Tidy, keep_large_blocks
from ..http.connection import HttpConnection, forget_heads
from ..http.connection_limits import MAX_SHARED_CONNECTIONS, Connections, connections, descriptor_limit
from ..http.head import Head
from ..http.infer import Infer
from ..http.paths import is_infer
from ..link import ring as links
from ..link.occupancy import LEAD, Occupancy
from ..link.ring import Descriptors
from ..tenants.frontend import Report
from ..tenants.lending import lend
from ..tenants.limits import limit, too_many_connections
from ..tenants.relay import Cancellations, Relay
from ..tenants.service import Service, Tenant, last_uses, open_tenant, page_out, publish, report
from . import handoff, messages, proxy, spawn
from .descriptors import DescriptorReceiver
from .handoff import Handoff
from .process_setup import set_up
from .routing import SHARED, UNAUTHENTICATED, process_for
from .rpc import Channel
from .spread_links import SpreadLinks
from .uvicorn_server import Server

if TYPE_CHECKING:
    from ..grpc.server import GrpcServer
    from ..tenants.spans import Spans

log = logging.getLogger("greenlane.processes")

_MAX_ACCEPTS = 16
"""Connections taken from the dispatcher in one iteration of the event loop."""
_NICE = 10
"""Added to the niceness of the shared and the unauthenticated HTTP process, so that tenants' processes go first."""
_SHORT_KEEP_ALIVE = 5
"""Seconds for which an idle connection without a tenant is kept, at most."""


@dataclass(frozen=True, slots=True)
class ProcessArguments:
    """The arguments of a new HTTP process.

    `name` is the tenant's, or SHARED or UNAUTHENTICATED; `handoff` the socket over which connections come and go back;
    `channel` that of the messages to and from the supervisor, and `descriptors` that of descriptors from it; `link` the
    tenant's link, None if its device side is in the same process, and `listeners` the sockets of its own port. `pages` are the
    descriptors of those of tenants that lend (`link.activity`): its own, and where its device side is here all.

    A tenant with several HTTP processes has an `occupancy`, the descriptor of the page that they share. Those with a `number`
    other than LEAD are helpers: their link is to the lead, as is the socket `to_lead` for cancellations.

    A tenant on several devices has the links in `spread`, by device, in place of `link`.
    """

    name: str
    config: Config
    handoff: socket.socket
    channel: socket.socket
    descriptors: socket.socket
    link: Descriptors | None
    listeners: list[socket.socket]
    pages: Mapping[str, int] = field(default_factory=dict)
    number: int = LEAD
    occupancy: Any = None
    to_lead: socket.socket | None = None
    spread: Mapping[str, Descriptors] = field(default_factory=dict)


class ReplayProtocol(asyncio.Protocol):
    """Gives the real protocol the bytes that another process read from its connection, before any that come later."""

    def __init__(self, protocol: asyncio.Protocol, data: bytes) -> None:
        self._protocol = protocol
        self._data = data

    def connection_made(self, transport: Any) -> None:
        transport.set_protocol(self._protocol)
        self._protocol.connection_made(transport)
        self._protocol.data_received(self._data)


class HostedSide(Protocol):
    """The device side of an HTTP process's own tenant, in the same process."""

    @property
    def tenant(self) -> Tenant:
        """The tenant, whose link is in this process."""

    def handlers(self, channel: Callable[[], Channel]) -> dict[type[messages.Message], Callable[[Any], Any]]:
        """The handlers of the supervisor's messages to a device side; `channel` returns the channel to the supervisor."""


class HttpProcess:
    """One HTTP process at work; `server.tenants.frontend` describes most of what comes over its channel.

    `hosted` is the device side of its tenant, if that is in this process.
    """

    def __init__(self, arguments: ProcessArguments, hosted: HostedSide | None = None) -> None:
        self._arguments = arguments
        self._hosted = hosted
        handlers: dict[type[messages.Message], Callable[[Any], Any]] = {
            messages.Announce: self._announce,
            messages.Publish: self._publish,
            messages.GetLastUses: self._last_uses,
            messages.PageOut: self._page_out,
            messages.PageIn: self._page_in,
            messages.SetAffinity: self._set_affinity,
            messages.SetState: self._set_state,
            messages.Reconfigure: self._reconfigure,
            messages.SetLogLevel: lambda message: logs.set_level(message.level),
            messages.Heartbeat: self._on_heartbeat,
            messages.Refuse: self._refuse,
            messages.Suspend: self._suspend,
            messages.FailInFlight: self._fail_in_flight,
            messages.Relink: self._relink,
            messages.AddHelper: self._add_helper,
            messages.GetReport: self._report,
            messages.WaitUntilIdle: self._wait_until_idle,
            messages.Exit: self._exit,
        }
        if hosted:
            handlers |= hosted.handlers(lambda: self._channel)
        self._channel = Channel("the supervisor", handlers)
        self._descriptors = DescriptorReceiver(arguments.descriptors)
        self._link = arguments.link
        self._tenant: Tenant | None = None
        self._spread: SpreadLinks | None = None
        self._occupancy: Occupancy | None = None
        self._relays: dict[int, Relay] = {}
        self._service = Service(arguments.config, [])
        self._tasks: set[asyncio.Task[None]] = set()
        self._grpc: GrpcServer | None = None
        self._server = Server(self._uvicorn())
        if arguments.name in (SHARED, UNAUTHENTICATED):
            self._server.server_state.connections = Connections(min(MAX_SHARED_CONNECTIONS, descriptor_limit()))  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<HttpProcess {self._arguments.name}, {self._service!r}>"

    async def run(self) -> None:
        """Serve until the supervisor asks this process to exit. Ends it if the supervisor has ended."""
        arguments, loop = self._arguments, asyncio.get_running_loop()
        if arguments.link or arguments.spread:
            if arguments.occupancy is not None:
                self._occupancy = Occupancy(arguments.occupancy, arguments.number)
            control = Cancellations(arguments.to_lead) if arguments.to_lead else self
            config = arguments.config.tenants[arguments.name]
            if arguments.spread:
                self._spread = SpreadLinks(arguments.spread)
                spread = self._spread.spread
                self._tenant = self._spread.tenant = open_tenant(config, spread.link, control, self._occupancy, spread)
            elif arguments.link:
                self._tenant = open_tenant(config, links.attach(arguments.link), control, self._occupancy)
            assert self._tenant
            self._tenant.lane.open(loop)
        elif self._hosted:
            self._tenant = self._hosted.tenant
        if self._tenant:
            if (page := arguments.pages.get(self._tenant.name)) is not None:
                lend(self._tenant, arguments.config, page, arguments.number)
            self._service = Service(arguments.config, [self._tenant])
            self._limit(self._tenant, arguments.config)
            if self._occupancy:
                self._service.totals = self._totals
            self._spawn(self._trim_memory(self._tenant))
        await self._channel.open(arguments.channel)
        arguments.handoff.setblocking(False)
        self._server.config.load()  # `serve` would do so, but connections may arrive before that.
        loop.add_reader(arguments.handoff.fileno(), self._on_handoff)
        self._spawn(self._exit_with_supervisor())
        if arguments.to_lead:
            loop.add_reader(arguments.to_lead.fileno(), os._exit, 1)  # The lead has ended, and its queue with it.
        self._grpc = await self._serve_grpc()
        spans = self._trace()
        await self._server.serve(arguments.listeners)
        await self._stop_grpc()
        if spans:
            await asyncio.to_thread(spans.close)
        for each in self._relays.values():
            await each.ended.wait()

    def _limit(self, tenant: Tenant, config: Config) -> None:
        """Set the tenant's limits, those of its connections too: all connections of this process are its."""
        limit(tenant, config, self._occupancy)
        most = config.tenants[tenant.name].max_connections
        connections(self._server.server_state).allow(most, partial(too_many_connections, tenant), self._occupancy)

    def _trace(self) -> "Spans | None":
        """Send spans of the tenant's requests, if that is configured. The thread that does belongs to this process."""
        if not self._tenant or self._arguments.config.server.tracing_endpoint is None:
            return None
        from ..tenants.spans import Spans  # It takes a third of a second and 25 MB, and need not be installed.

        spans = Spans(self._arguments.config.server)
        spans.trace([self._tenant.tracing])
        return spans

    def cancel(self, slot: int, serial: int) -> None:
        """Ask the worker to stop a ticket; see `Control`."""
        self._channel.notify(messages.CancelTicket(slot, serial))

    async def _serve_grpc(self) -> "GrpcServer | None":
        """Listen on the tenant's gRPC port, if it has one."""
        if not self._tenant or self._tenant.config.grpc_port is None or self._arguments.number != LEAD:
            return None
        from ..grpc.server import GrpcServer  # It takes a tenth of a second and 20 MB, and need not be installed.

        grpc = GrpcServer(self._service, self._tenant.name, shares_port=True)
        await grpc.start()
        return grpc

    async def _stop_grpc(self) -> None:
        """Stop it, or wait until it has stopped."""
        if self._grpc:
            await self._grpc.stop()

    def _uvicorn(self) -> uvicorn.Config:
        infer = Infer(lambda: self._service)
        application = framework.build(
            (
                metadata.router,
                model_control.router,
                docs.router,
                status_page.router,
                text.router,
                trace_settings.router,
                proxy.router,
            ),
            service=lambda: self._service,
            forward=self._forward,
            model_control=proxy.RemoteModelControl(self._forward),
        )

        async def everything(scope: Any, receive: Any, send: Any) -> None:
            await (infer if is_infer(scope["path"]) else application)(scope, receive, send)

        shared = self._shared = cors.Shared(everything, self._arguments.config.server.cors_origins)
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
        seconds = ceil(self._arguments.config.server.keep_alive)
        return min(seconds, _SHORT_KEEP_ALIVE) if self._arguments.name in (SHARED, UNAUTHENTICATED) else seconds

    async def _forward(self, request: messages.ForwardedRequest) -> messages.ForwardedAnswer:
        answer: messages.ForwardedAnswer = await self._channel.call(request, messages.ForwardedAnswer)
        return answer

    async def _exit_with_supervisor(self) -> None:
        await self._channel.closed.wait()
        os._exit(1)

    def _on_handoff(self) -> None:
        """Connections have arrived, or the dispatcher has ended."""
        with suppress(BlockingIOError):
            for _ in range(_MAX_ACCEPTS):
                if not self._receive_next():
                    asyncio.get_running_loop().remove_reader(self._arguments.handoff.fileno())
                    return

    def _receive_next(self) -> bool:
        """Take one connection; False once the dispatcher is gone. Raises BlockingIOError if there is none now."""
        received = handoff.receive(self._arguments.handoff)
        if received:
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
        data, server = received.data(), self._server

        def make() -> asyncio.Protocol:
            kind: Any = server.config.http_protocol_class
            protocol: asyncio.Protocol = kind(config=server.config, server_state=server.server_state, app_state={})
            return ReplayProtocol(protocol, data) if data else protocol

        with suppress(OSError):  # The client has disconnected.
            await asyncio.get_running_loop().connect_accepted_socket(make, received.connection)

    def _hand_off(self, head: Head, transport: Any, data: bytes | bytearray) -> bool:
        """Give a connection back to the dispatcher if its next request is for another process; whether it was given back.

        `data` is what was read of that request. Headers that this process answered before need no second look.
        """
        if head.target is not None or transport.get_write_buffer_size():
            return False
        name = head.tenant = process_for(head.path, head.headers, self._service.tenancy)
        if name == self._arguments.name or (self._tenant and not self._may_pass_to(name, transport)):
            return False
        try:
            self._give_back(name, transport, data)
        except OSError:
            return False
        return True

    def _may_pass_to(self, name: str, transport: Any) -> bool:
        """Whether a tenant's connection may move to this process: to another tenant's, unless it came by the tenant's own port.

        A client that can reach one tenant's port may not be permitted to reach the other tenants.
        """
        own = self._arguments.config.tenants[self._arguments.name].port
        return name in self._service.tenancy.tenants and transport.get_extra_info("sockname")[1] != own

    def _give_back(self, name: str, transport: Any, data: bytes | bytearray) -> None:
        read_ahead = handoff.memory_file(bytes(data))
        try:
            handoff.send(self._arguments.handoff, Handoff(name, transport.get_extra_info("socket"), read_ahead))
        finally:
            os.close(read_ahead)

    async def _trim_memory(self, tenant: Tenant) -> None:
        """While the tenant is idle, return the memory that large bodies and answers took to the system."""
        tidy = Tidy(lambda: (tenant.uploads.counted, *(served.statistics.last for served in tenant.catalog.served())))
        while True:
            await asyncio.sleep(QUIET)
            tidy.look()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a connection could not be taken: %s", error, exc_info=error)

    def _announce(self, message: messages.Announce) -> None:
        if self._tenant:
            self._tenant.catalog.announce(message.name)

    async def _publish(self, message: messages.Publish) -> bool:
        if self._spread:
            await self._spread.publish(message)
        elif self._tenant:
            served = [each.served() for each in message.served]
            if self._arguments.number != LEAD:  # The lead batches, and has the models' own queues.
                served = [replace(each, batching=None, queues=None) for each in served]
            await publish(self._tenant, message.name, served, message.problems)
        return True

    def _last_uses(self, _: messages.GetLastUses) -> dict[str, int]:
        return last_uses(self._tenant) if self._tenant else {}

    def _page_out(self, message: messages.PageOut) -> bool:
        return self._tenant is not None and page_out(self._tenant, message.model)

    def _page_in(self, message: messages.PageIn) -> None:
        if self._tenant:
            self._tenant.catalog.paged.discard(message.model)

    def _set_affinity(self, message: messages.SetAffinity) -> None:
        try:
            os.sched_setaffinity(0, message.cores)
        except OSError as error:
            log.warning("the HTTP process cannot run on cores %s: %s", sorted(message.cores), error.strerror)
        else:
            spawn.set_own_affinity(message.cores)  # gRPC's threads as well.

    def _set_state(self, message: messages.SetState) -> None:
        loaded = self._service.state == "starting" and message.state in ("serving", "incomplete")
        self._service.set_state(message.state)
        if loaded:
            gc.collect()
            gc.freeze()

    def _reconfigure(self, message: messages.Reconfigure) -> bool:
        config = message.config(self._service.config)
        self._service.reconfigure(config)
        self._shared.set(config.server.cors_origins)
        if self._tenant and self._tenant.name in config.tenants:
            self._limit(self._tenant, config)
        forget_heads(connections(self._server.server_state))
        return True

    def _on_heartbeat(self, _: messages.Heartbeat) -> None:
        self._service.heartbeat()
        self._channel.notify(messages.HeartbeatAnswer())

    def _refuse(self, message: messages.Refuse) -> None:
        if self._tenant:
            self._tenant.refuse(message.reason)

    def _suspend(self, message: messages.Suspend) -> None:
        if self._spread and message.device:
            self._spread.suspend(message.device, message.reason)
        elif self._tenant:
            self._tenant.suspend(message.reason)

    def _fail_in_flight(self, message: messages.FailInFlight) -> None:
        if self._spread and message.device:
            self._spread.fail_in_flight(message.device, message.reason)
        elif self._tenant:
            self._tenant.fail_in_flight(message.reason, message.queued)

    async def _relink(self, message: messages.Relink) -> bool:
        assert self._tenant, "only tenants have links"
        arena, memory, tickets, completions = self._descriptors.take(message.number, 4)
        unused = Descriptors(arena, memory, tickets, completions, message.slots, message.nbytes)
        try:
            if self._spread:
                unused = self._spread.relink(message.device, unused)
                return True
            lane = self._tenant.lane
            relinked = await lane.relink(links.attach(unused, lane.slots.memory), message.limit)
            if relinked and self._link:
                unused, self._link = self._link, unused
            return relinked
        finally:
            unused.close()

    async def _add_helper(self, message: messages.AddHelper) -> bool:
        assert self._tenant, "only tenants have helpers"
        assert self._occupancy
        *of_link, cancellations = self._descriptors.take(message.descriptors, 5)
        arena, memory, tickets, completions = of_link
        descriptors = Descriptors(arena, memory, tickets, completions, message.slots, message.nbytes)
        end, lane = socket.socket(fileno=cancellations), self._tenant.lane
        if before := self._relays.get(message.number):
            await before.ended.wait()
        link = links.attach(descriptors, lane.slots.memory)
        relay = self._relays[message.number] = Relay(message.number, lane, self._tenant.catalog, link, end, self._occupancy)
        relay.open(asyncio.get_running_loop())
        self._spawn(self._close_link(relay, descriptors))
        return True

    async def _close_link(self, relay: Relay, descriptors: Descriptors) -> None:
        """Close a helper's link when that has ended."""
        await relay.ended.wait()
        descriptors.close()

    async def _totals(self) -> Report:
        """The report of all processes of the tenant."""
        found: messages.ReportFields = await self._channel.call(messages.GetTotals(), messages.ReportFields)
        return found.report()

    def _report(self, _: messages.GetReport) -> messages.ReportFields:
        assert self._tenant, "only tenants are asked for reports"
        return messages.ReportFields.of(report(self._tenant))

    async def _wait_until_idle(self, _: messages.WaitUntilIdle) -> None:
        if self._tenant:
            await self._tenant.lane.drained()

    def _exit(self, _: messages.Exit) -> None:
        """Exit once all requests are answered, those on connections that were already handed over as well."""
        with suppress(BlockingIOError):
            while self._receive_next():
                pass
        self._server.should_exit = True
        self._spawn(self._stop_grpc())


def main(arguments: ProcessArguments) -> None:
    """The process."""
    server = arguments.config.server
    set_up(arguments.name, server.log_format, server.log_level, number=arguments.number, audit=server.audit)
    keep_large_blocks()
    if arguments.name in (SHARED, UNAUTHENTICATED):
        os.nice(_NICE)
    uvloop.run(HttpProcess(arguments).run())
    sys.exit(0)
