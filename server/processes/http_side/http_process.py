"""One HTTP process: takes connections from the dispatcher, sends tickets over its tenant's link, and answers."""

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Collection, Coroutine, Set
from contextlib import suppress
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
import uvloop

from engines.thread_priority import lower_priority

from ...api import browsers, framework
from ...api.docs import ROUTERS
from ...api.framework import ask
from ...config.schema import Config
from ...host import forkserver, logs
from ...host.malloc import QUIET, Tidy, keep_large_blocks
from ...http.connection import HttpConnection, forget_heads
from ...http.connection_limits import MAX_SHARED_CONNECTIONS, Connections, Refusals, connections, descriptor_limit
from ...http.infer import Infer
from ...http.paths import is_infer
from ...link.occupancy import LEAD
from ...scheduling.limits import TokenBucket
from ...tenants.service import Service, Tenant, limit, too_many_connections
from ..channels.calls import proxy, serve
from ..channels.http_protocols import FromHelper, FromHttpProcess, FromLead, Live, Logging, ToHttp, ToTenant, Wanted
from ..channels.routing import SHARED, UNAUTHENTICATED
from ..channels.rpc import Channel, Handlers
from ..children import spawn
from ..children.process_setup import ProcessArguments, set_up
from . import proxy as forwarding
from .connection_handoff import ConnectionHandoff, Paced, Server
from .tenant_side import TenantSide

if TYPE_CHECKING:
    from ...grpc.server import GrpcServer
    from ...tenants.spans import Spans

log = logging.getLogger("greenlane.processes")

UNAUTHENTICATED_RATE = 200
"""Connections that show no valid tenant and are served in a second, and at once if there were none before. All of them are
refused, or passed on once their headers are complete; those of a flood wait, so that tenants get the cores.
"""
_SHORT_KEEP_ALIVE = 5
"""Seconds for which an idle connection without a tenant is kept, at most."""


class HostedSide(Protocol):
    """The device side of an HTTP process's own tenant, in the same process."""

    @property
    def tenant(self) -> Tenant:
        """The tenant, whose link is in this process."""

    def handlers(self) -> Handlers:
        """The handlers of the supervisor's calls of a device side."""

    def connect(self, channel: Channel) -> None:
        """Call the supervisor over this channel, which is opened next."""


class HttpProcess:
    """One HTTP process at work: its event loop, its server, and what concerns the process, not its tenant (`TenantSide`).

    `hosted` is the device side of its tenant, if that is in this process.
    """

    def __init__(self, arguments: ProcessArguments, hosted: HostedSide | None = None) -> None:
        self._arguments = arguments
        self._hosted = hosted
        self._side = TenantSide(arguments, self._spawn)
        self._tenant: Tenant | None = None
        self._wanted = Wanted()
        handlers: Handlers = {**serve(ToHttp)(lambda: self), **serve(Logging)(lambda: self)}
        if arguments.name in arguments.config.tenants:
            handlers |= serve(ToTenant)(lambda: self._side)
        if hosted:
            handlers |= hosted.handlers()
        self._channel = Channel("the supervisor", handlers)
        self._supervisor, self._lead = proxy(FromHttpProcess, self._channel), proxy(FromLead, self._channel)
        if hosted:
            hosted.connect(self._channel)
        self._service = Service(arguments.config, [])
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening = asyncio.Event()
        """Set once connections to its tenant's own port may be accepted, or when it exits."""
        self._grpc: GrpcServer | None = None
        pace = TokenBucket(UNAUTHENTICATED_RATE, UNAUTHENTICATED_RATE) if arguments.name == UNAUTHENTICATED else None
        self._handoff = ConnectionHandoff(arguments.handoff, arguments.name, lambda: self._service, self._spawn, pace)
        self._handoff.learn(arguments.config)
        self._server = Server(self._uvicorn())
        if arguments.name in (SHARED, UNAUTHENTICATED):
            self._server.server_state.connections = Connections(min(MAX_SHARED_CONNECTIONS, descriptor_limit()))  # type: ignore[assignment]

    async def run(self) -> None:
        """Serve until the supervisor asks this process to exit. Ends it if the supervisor has ended."""
        arguments = self._arguments
        self._tenant = tenant = self._side.open(self, self._hosted.tenant if self._hosted else None)
        if tenant:
            self._service = Service(arguments.config, [tenant])
            self._limit(tenant, arguments.config)
            if self._side.occupancy:
                self._service.totals = proxy(FromHelper, self._channel).report
            self._spawn(self._trim_memory(tenant))
        if arguments.config.models.python:
            self._let_go_in_forks()
        await self._channel.open(arguments.channel)
        self._server.config.load()  # `serve` would do so, but connections may arrive before that.
        self._handoff.open(self._server)
        self._spawn(self._exit_with_supervisor())
        if lead := arguments.to_lead:  # Where the lead ends, its queue ends with it.
            asyncio.get_running_loop().add_reader(lead.fileno(), os._exit, 1)
        self._grpc = await self._serve_grpc()
        spans = self._trace()
        if arguments.arriving:
            await self._listening.wait()
        await self._server.serve([] if self._server.should_exit else arguments.listeners)
        await self._stop_grpc()
        if spans:
            await asyncio.to_thread(spans.close)
        await self._side.relays_ended()

    def _limit(self, tenant: Tenant, config: Config) -> None:
        """Set the tenant's limits, those of its connections too: all connections of this process are its."""
        own, occupancy = config.tenants[tenant.name], self._side.occupancy
        limit(tenant, own, config.server.max_body, occupancy)
        connections(self._server.server_state).allow(own.max_connections, partial(too_many_connections, tenant), occupancy)

    def _let_go_in_forks(self) -> None:
        """Have what functions fork hold no connection and no port of this process, nor the forkserver's life."""
        arguments = self._arguments
        tenant = arguments.config.tenants.get(arguments.name)
        self._handoff.ports.update(each for each in (tenant and tenant.port, tenant and tenant.grpc_port) if each)
        ends = arguments.handoff, arguments.channel, arguments.descriptors, arguments.to_lead
        let_go_in_forks(self._handoff.ports, [*(each.fileno() for each in ends if each), *forkserver.kept_alive_by()])

    def _trace(self) -> "Spans | None":
        """Send spans of the tenant's requests, if that is configured. The thread that does belongs to this process."""
        if not self._tenant or self._arguments.config.server.tracing_endpoint is None:
            return None
        from ...tenants.spans import Spans  # It takes a third of a second and 25 MB, and need not be installed.

        spans = Spans(self._arguments.config.server)
        spans.trace([self._tenant.tracing])
        return spans

    def cancel(self, slot: int, serial: int) -> None:
        """Ask the worker to stop a ticket; see `Canceller`."""
        self._lead.cancel(slot, serial)

    async def _serve_grpc(self) -> "GrpcServer | None":
        """Listen on the tenant's gRPC port, if it has one."""
        if not self._tenant or self._tenant.config.grpc_port is None or self._arguments.number != LEAD:
            return None
        from ...grpc.server import GrpcServer  # It takes a tenth of a second and 20 MB, and need not be installed.

        grpc = GrpcServer(self._service, self._tenant.name, partial(ask, self._application), shares_port=True)
        await grpc.start()
        return grpc

    async def _stop_grpc(self) -> None:
        """Stop it, or wait until it has stopped."""
        if self._grpc:
            await self._grpc.stop()

    def _uvicorn(self) -> uvicorn.Config:
        infer = Infer(lambda: self._service)
        if self._arguments.name in (SHARED, UNAUTHENTICATED):
            infer.refusals = Refusals()
        application = self._application = framework.build(
            (*ROUTERS, forwarding.router),
            service=lambda: self._service,
            forward=self._supervisor.forward,
            open_turn=asyncio.Lock(),
            model_control=forwarding.RemoteModelControl(self._supervisor.forward),
        )

        async def everything(scope: Any, receive: Any, send: Any) -> None:
            await (infer if is_infer(scope["path"]) else application)(scope, receive, send)

        shared = self._shared = browsers.Shared(everything, self._arguments.config.server.cors_origins)
        return uvicorn.Config(
            Paced(shared, infer.refusals) if infer.refusals else shared,
            loop="uvloop",
            lifespan="off",
            ws="none",
            http=partial(HttpConnection, infer, shared, self._handoff.give_back),  # type: ignore[arg-type]
            timeout_keep_alive=self._keep_alive(),
            log_config=None,
            access_log=False,
            server_header=False,
        )

    def _keep_alive(self) -> int:
        seconds = ceil(self._arguments.config.server.keep_alive)
        return min(seconds, _SHORT_KEEP_ALIVE) if self._arguments.name in (SHARED, UNAUTHENTICATED) else seconds

    async def _exit_with_supervisor(self) -> None:
        await self._channel.closed.wait()
        os._exit(1)

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

    def follow(self, wanted: Wanted) -> None:
        before, self._wanted = self._wanted, wanted
        if wanted.cores and wanted.cores != before.cores:
            self._set_affinity(wanted.cores)
        if self._tenant:
            self._side.follow(before, wanted)
        self._service.set_state(wanted.state, wanted.progress)
        if before.state == "starting" and wanted.state in ("serving", "incomplete"):
            gc.collect()
            gc.freeze()

    def _set_affinity(self, cores: frozenset[int]) -> None:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            log.warning("the HTTP process cannot run on cores %s: %s", sorted(cores), error.strerror)
        else:
            spawn.set_own_affinity(cores)  # gRPC's threads as well.

    async def reconfigure(self, live: Live) -> None:
        config = live.config(self._service.config)
        self._service.reconfigure(config)
        self._handoff.learn(config)
        self._shared.set(config.server.cors_origins)
        if self._tenant and self._tenant.name in config.tenants:
            self._limit(self._tenant, config)
        forget_heads(connections(self._server.server_state))

    def set_log_level(self, level: str) -> None:
        logs.set_level(level)

    async def heartbeat(self) -> None:
        self._service.heartbeat()

    def listen(self) -> None:
        self._listening.set()

    def exit(self) -> None:
        """Exit once all requests are answered, those on connections that were already handed over as well."""
        self._handoff.take_all()
        self._server.should_exit = True
        self._listening.set()
        self._spawn(self._stop_grpc())


def main(arguments: ProcessArguments) -> None:
    """The process."""
    server = arguments.config.server
    set_up(arguments.name, server.log_format, server.log_level, number=arguments.number, audit=server.audit)
    keep_large_blocks()
    if arguments.name in (SHARED, UNAUTHENTICATED):
        lower_priority()  # So that tenants' processes go first.
    uvloop.run(HttpProcess(arguments).run())
    sys.exit(0)


def let_go_in_forks(ports: Set[int], descriptors: Collection[int]) -> None:
    """From now on each fork of this process, as by a model's functions, replaces these descriptors, and all sockets of these
    ports, by /dev/null. Otherwise it would hold the tenant's port after its parent's end, and no client would see the end of a
    connection.

    `ports` may grow. For forks by Python; what a library forks in C has all of them until it ends.
    """
    os.register_at_fork(after_in_child=lambda: _let_go(ports, descriptors))


def _let_go(ports: Set[int], descriptors: Collection[int]) -> None:
    """Numbers stay in use, so that objects of the parent that are closed here close nothing else."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in (*descriptors, *_sockets(ports)):
        with suppress(OSError):
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _sockets(ports: Set[int]) -> list[int]:
    """The descriptors of this process that are sockets of TCP at these ports of its own."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            copy = socket.socket(fileno=number)
            try:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] in ports:
                    found.append(number)
            finally:
                copy.detach()
    return found
