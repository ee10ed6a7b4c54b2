"""The server in one process, as an ASGI application; the composition root of both sides.

`uvicorn server.app:app` serves what `configuration_file` finds. Inference requests go to `Infer`,
all others to FastAPI.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from fastapi import FastAPI

from engines import has_tensorrt
from partitions import Device, DeviceUnavailable, PartitionError, has_driver, open_device
from partitions.mps import stay_outside

from . import demo, single_process
from .admin import docs as admin_docs
from .admin.lifecycle import ROUTERS as ADMIN_ROUTERS
from .admin.lifecycle import ServerEnd
from .admin.models import LocalModelControl
from .api import browsers, docs, framework
from .api.docs import ROUTERS
from .api.framework import ask, audited
from .command_line import BESIDE, configuration_file
from .config.file import load
from .config.schema import Config, DeviceConfig
from .config.tables import ConfigError
from .control.controller import Controller
from .control.reconfiguration import reconfigure
from .control.reload import ReadConfig, Reloader, without_file
from .control.together import together
from .control.watcher import Watcher
from .device.runtime import Runtime
from .errors import Unavailable
from .host import logs
from .host.leaving import end_now
from .host.malloc import keep_large_blocks
from .host.signals import Terminal
from .host.watchdog import Watchdog
from .http.asgi import below_root
from .http.connection import forget_heads
from .http.exchange import Message, Receive, Send
from .http.infer import Infer
from .http.paths import is_infer
from .http.uvicorn_protocol import UNREAD
from .link import ring
from .link.activity import open_pages
from .observing.observers import Observers
from .single_process import AnotherWorker, only_worker, worker_parent
from .tenants.local_frontend import open_local
from .tenants.service import Service, limit

log = logging.getLogger("greenlane")

OPERATOR_ERRORS = (ConfigError, PartitionError, AnotherWorker)
"""Errors that the operator can correct; they are reported without a traceback."""

Source = Callable[[], AbstractContextManager[Config]]


def open_configured(config: DeviceConfig) -> Device:
    """Open a device as it is configured; `auto` is a GPU only if TensorRT is installed.

    Raises DeviceUnavailable.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # One hardware queue for each tenant's stream.
    cores, index = config.cores, config.index
    if config.backend != "auto":
        return open_device(config.backend, cores, index)
    if not has_tensorrt():
        log.info("the device is the CPU: TensorRT is not installed")
        return open_device("cpu", cores)
    try:
        return open_device("cuda", index=index)
    except DeviceUnavailable as error:  # TensorRT was installed to be used.
        log.warning("the device is the CPU, though TensorRT is installed: %s", error)
        return open_device("cpu", cores)


def open_alone(config: DeviceConfig) -> Device:
    """The same for a command, which is no client of an MPS daemon that an operator runs: its fault would end the others there.

    Call it before this process uses CUDA.
    """
    stay_outside()
    return open_configured(config)


def on_host_cores(config: DeviceConfig) -> bool:
    """Whether a device is cores of this host for certain, without opening it; logs why."""
    if config.backend == "auto" and not has_tensorrt():
        log.info("the device is the CPU: TensorRT is not installed")
        return True
    if config.backend == "auto" and not has_driver():
        log.warning("the device is the CPU, though TensorRT is installed: there is no NVIDIA driver (libcuda.so.1)")
        return True
    return config.backend == "cpu"


class Application:
    """Greenlane as an ASGI application; its devices are open from lifespan startup to shutdown.

    `source` returns the configuration as a context manager, which is entered and left on a thread, the latter after everything
    is closed. `opener` opens the device. `prepare` is called with the configuration before anything is opened, and with that of
    each reload; it raises ConfigError for a configuration that cannot be served in this way. `read` reads it again, for a
    reload.
    `abandon` ends the process with a status when the device is lost, which nothing can be closed after, or when shutdown takes
    too long.
    """

    def __init__(
        self,
        source: Source,
        opener: Callable[[DeviceConfig], Device] = open_configured,
        abandon: Callable[[int], object] = end_now,
        prepare: Callable[[Config], object] = lambda _: None,
        read: ReadConfig = without_file,
    ) -> None:
        self._source = source
        self._prepare = prepare
        self._opener = opener
        self._abandon = abandon
        self._read = read
        self._opened: tuple[Service, Controller, Observers] | None = None
        self._reloader: Reloader | None = None
        self.infer = Infer(self.service)
        self._shared = browsers.Shared(self._answer)
        self._web = framework.build(
            (*ROUTERS, *ADMIN_ROUTERS),
            self.lifespan,
            service=self.service,
            controller=self.controller,
            observers=self.observers,
            reloader=self.reloader,
            set_log_level=logs.set_level,
            model_control=LocalModelControl(self.controller),
        )

        self._audited = audited(self._web)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        await self._shared(below_root(scope), receive, send)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_infer(scope["path"]):
            await self.infer(scope, receive, send)
        else:
            await self._audited(scope, receive, _in_lines(send) if scope["type"] == "lifespan" else send)

    def service(self) -> Service:
        """The HTTP side. Raises Unavailable before startup and after shutdown."""
        return self._require_open()[0]

    def controller(self) -> Controller:
        """The control plane. Raises Unavailable before startup and after shutdown."""
        return self._require_open()[1]

    def observers(self) -> Observers:
        """What watches the server. Raises Unavailable before startup and after shutdown."""
        return self._require_open()[2]

    def reloader(self) -> Reloader:
        """What reads the configuration again. Raises Unavailable before startup and after shutdown."""
        self._require_open()
        assert self._reloader
        return self._reloader

    async def _reconfigure(self, config: Config) -> None:
        """Use this configuration in all of this process."""
        self._prepare(config)
        service = self.service()
        service.reconfigure(config)
        for tenant in service.tenants.values():
            limit(tenant, config.tenants[tenant.name], config.server.max_body)
        self._shared.set(config.server.cors_origins)
        forget_heads(self.infer.connections)

    def _require_open(self) -> tuple[Service, Controller, Observers]:
        if self._opened is None:
            raise Unavailable("the server is starting")
        return self._opened

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[dict[str, object]]:
        """Open the device, load the models in the background, and close everything at shutdown."""
        with only_worker(worker_parent()):
            async with self._serving():
                yield {UNREAD: self.infer.unread}

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        keep_large_blocks()
        source = self._source()
        config = await asyncio.to_thread(source.__enter__)
        try:
            logs.configure(config.server.log_format, config.server.log_level, config.server.audit)
            log_configuration(config)
            async with Watchdog(config.server):
                self._prepare(config)
                device = self._opener(config.device)
                service, controller = assemble(config, device)
                self._opened = service, controller, Observers(controller)
                use = partial(reconfigure, controller, everywhere=self._reconfigure)
                self._reloader = Reloader(controller, self._read, use)
                self._shared.set(config.server.cors_origins)
                log_compilation()
                docs.document(), admin_docs.document()
                grpc = _serving_grpc(service, partial(ask, self._audited))
                async with Watcher(controller), self._running(controller), grpc, _sending_spans(service):
                    yield
        finally:
            self._opened = None
            await asyncio.to_thread(source.__exit__, None, None, None)

    @asynccontextmanager
    async def _running(self, controller: Controller) -> AsyncIterator[None]:
        """Start, and end in order by SIGTERM, by the end of this block or as the start fails, or at once if the device is lost.

        Closes the controller.
        """
        end = ServerEnd(controller, self._abandon)
        async with AsyncExitStack() as left:  # They are called from the last one up.
            left.callback(end.cancel_timer)
            left.callback(end.close)
            left.callback(asyncio.create_task(self._exit_when_device_lost(end)).cancel)
            left.push_async_callback(controller.close)
            await controller.start()
            end.freeze_when_loaded()
            left.callback(_drain_on_sigterm(end.drain, self.reloader))
            yield

    async def _exit_when_device_lost(self, end: ServerEnd) -> None:
        self._abandon(await end.device_lost())


def assemble(config: Config, device: Device) -> tuple[Service, Controller]:
    """Everything in one process."""
    frontends = {name: open_local(tenant, only=len(config.tenants) == 1) for name, tenant in config.tenants.items()}
    pages = open_pages(config.tenants)
    for name, page in pages.items():
        frontends[name].tenant.use_page(config.tenants, page)
    for frontend in frontends.values():
        limit(frontend.tenant, frontend.tenant.config, config.server.max_body)
    service = Service(config, [frontend.tenant for frontend in frontends.values()])
    controller = Controller(config, frontends, service.set_state)
    controller.on_progress = partial(service.set_state, "starting")
    runtime = Runtime(
        config,
        device,
        frontends,
        partial(controller.on_state, tuple(frontends)),
        controller.on_lost,
        on_loading=controller.on_loading,
        pages=pages,
    )
    controller.add(dict.fromkeys(frontends, runtime), next(iter(config.named_devices)), runtime)
    return service, controller


@asynccontextmanager
async def _serving_grpc(service: Service, ask: Callable[..., Awaitable[tuple[int, bytes]]]) -> AsyncIterator[None]:
    """Listen on the tenants' gRPC ports while this block runs; `ask` asks the routes of HTTP. Raises ConfigError."""
    servers = []
    try:
        for name, tenant in service.config.tenants.items():
            if tenant.grpc_port is not None:
                from .grpc.server import GrpcServer  # It need not be installed.

                servers.append(GrpcServer(service, name, ask))
                await servers[-1].start()
        yield
    finally:
        await together(server.stop() for server in servers)


@asynccontextmanager
async def _sending_spans(service: Service) -> AsyncIterator[None]:
    """Send spans of all tenants' requests while this block runs, if that is configured."""
    if service.config.server.tracing_endpoint is None:
        yield
        return
    from .tenants.spans import Spans  # It need not be installed.

    spans = Spans(service.config.server)
    spans.trace(tenant.tracing for tenant in service.tenants.values())
    try:
        yield
    finally:
        await asyncio.to_thread(spans.close)


def _in_lines(send: Send) -> Send:
    """Report errors that the operator can correct as their lines, in place of the framework's traceback."""

    async def send_lines(message: Message) -> None:
        error = sys.exception()
        if message["type"] == "lifespan.startup.failed" and isinstance(error, OPERATOR_ERRORS):
            about = "the configuration cannot be served:\n" if isinstance(error, ConfigError | PartitionError) else ""
            message = {**message, "message": f"greenlane: {about}{error}"}
        await send(message)

    return send_lines


def log_compilation() -> None:
    """Log whether the hot path runs as machine code, or how much faster a wheel is whose hot path does."""
    if (ring.__file__ or "").endswith(".py"):
        log.info("hot path: interpreted Python; compiled (scripts/install --compiled) it serves 1.2 to 1.7 times the requests")
    else:
        log.info("hot path: compiled to machine code")


def log_configuration(config: Config) -> None:
    """Log which configuration is served, as it may be one that no option has named."""
    if config.source != demo.SOURCE:
        log.info("the configuration is %s", config.source)
        return
    log.info("the demo, as no configuration was named by --config or GREENLANE_CONFIG, and this folder has no %s", BESIDE)
    if len(config.tenants) == 1:
        log.warning("this machine has one core to share out, so the demo has one tenant, acme, instead of two")


def configuration(path: str | None) -> AbstractContextManager[Config]:
    """The configuration in a file, with its models if they are elsewhere, or the demo's. Blocks. Raises ConfigError."""
    if not path:
        return demo.configuration()
    config = load(Path(path))
    if config.models.remote:
        from .repository.mirror import fetch_first

        fetch_first(config.models)
    return nullcontext(config)


def _drain_on_sigterm(drain: Callable[[], Awaitable[None]], reloader: Callable[[], Reloader]) -> Callable[[], None]:
    """Make SIGTERM drain before it does what it did; a second one does that at once. Returns a function that undoes this.

    The same for SIGHUP of a terminal that closes; any other SIGHUP reloads, unless it is ignored, as under nohup.
    """
    if current_thread() is not main_thread():
        return lambda: None
    loop = asyncio.get_running_loop()
    before: Any = signal.getsignal(signal.SIGTERM)
    draining: list[asyncio.Task[None]] = []

    async def drain_first() -> None:
        await drain()
        before(signal.SIGTERM, None)

    def on_signal(number: int, frame: Any) -> None:
        if draining:
            before(signal.SIGTERM, frame)
        else:
            loop.call_soon_threadsafe(lambda: draining.append(loop.create_task(drain_first())))

    if not callable(before):
        return lambda: None
    signal.signal(signal.SIGTERM, on_signal)
    terminal = Terminal()

    def on_hang_up(number: int, frame: Any) -> None:
        if terminal.closed:
            on_signal(number, frame)
        else:
            loop.call_soon_threadsafe(lambda: reloader().on_signal())

    if handles_hang_up := signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, on_hang_up)

    def restore() -> None:
        signal.signal(signal.SIGTERM, before)
        if handles_hang_up:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

    return restore


def _read_again() -> Config:
    path = configuration_file(None)
    return load(Path(path)) if path else without_file()


app = Application(lambda: configuration(configuration_file(None)), prepare=single_process.prepare, read=_read_again)
