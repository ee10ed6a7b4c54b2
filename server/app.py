"""The composition root: the only place that sees the whole configuration and the environment.

`uvicorn server.app:app` serves what GREENLANE_CONFIG names, or the demo. Inference requests go to `Infer`; everything
else goes to the framework.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from threading import Timer, current_thread, main_thread
from typing import Any

from fastapi import FastAPI

from engines import has_tensorrt
from partitions import Device, DeviceUnavailable, PartitionError, open_device

from . import demo, single_process
from .admin import docs as admin_docs
from .admin.lifecycle import EXIT_DELAY, ROUTERS, freeze
from .admin.models import LocalModelControl
from .api import cors, docs, framework, metadata, model_control
from .config.file import load
from .config.schema import Config, ConfigError, ServerConfig
from .device.model_loader import Read
from .device.runtime import Runtime
from .errors import Unavailable
from .host import logs
from .host.exit_codes import NEEDS_RESTART
from .host.malloc import keep_large_blocks
from .host.shutdown_timer import end_in_time
from .host.single_worker import AnotherWorker, only_worker, worker_parent
from .host.watchdog import Watchdog
from .http import asgi
from .http.disconnects import Receive
from .http.infer import Infer, Send
from .http.paths import is_infer
from .link import ring
from .tenants.service import Service, open_local

log = logging.getLogger("greenlane")

MISTAKES = (ConfigError, PartitionError, AnotherWorker)
"""What the operator can put right."""

Source = Callable[[], AbstractContextManager[Config]]


def open_configured(config: Config) -> Device:
    """The device that a configuration asks for; `auto` is a GPU only where there is TensorRT to serve from it.

    Raises DeviceUnavailable.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # Each tenant's stream in a hardware queue of its own.
    backend, cores, index = config.device.backend, config.device.cores, config.device.index
    if backend != "auto":
        return open_device(backend, cores, index)
    if not has_tensorrt():
        log.info("the device is the CPU: TensorRT is not installed")
        return open_device("cpu", cores)
    try:
        return open_device("cuda", index=index)
    except DeviceUnavailable as error:  # Whoever installed TensorRT means to use it.
        log.warning("the device is the CPU, though TensorRT is installed: %s", error)
        return open_device("cpu", cores)


class Application:
    """Greenlane as an ASGI application; its runtime lives from lifespan startup to shutdown.

    `source` gives the configuration; it is called on a thread, and what it holds is released after the runtime.
    `opener` gives the device that the configuration asks for. `abandon` ends the process, with a status, once the device
    is lost and everyone was told: nothing of it could be closed in order. `prepare` is called with the configuration before
    anything is opened; it raises ConfigError for one that cannot be served in this way.
    """

    def __init__(
        self,
        source: Source,
        opener: Callable[[Config], Device] = open_configured,
        abandon: Callable[[int], object] = os._exit,
        prepare: Callable[[Config], object] = lambda _: None,
    ) -> None:
        self._source = source
        self._prepare = prepare
        self._opener = opener
        self._abandon = abandon
        self._found: tuple[Service, Runtime] | None = None
        self.infer = Infer(self.service)
        self._shared: asgi.Application = self._answer
        self._web = framework.build(
            (metadata.router, model_control.router, docs.router, *ROUTERS),
            self.lifespan,
            service=self.service,
            runtime=self.runtime,
            model_control=LocalModelControl(self.runtime),
        )

    def __repr__(self) -> str:
        return f"<Application {self._found!r}>"

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await self._shared(scope, receive, send)

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_infer(scope["path"]):
            await self.infer(scope, receive, send)
        else:
            await self._web(scope, receive, _in_lines(send) if scope["type"] == "lifespan" else send)

    def service(self) -> Service:
        """What the HTTP side knows. Raises Unavailable while there is none."""
        return self._open[0]

    def runtime(self) -> Runtime:
        """The runtime. Raises Unavailable while there is none."""
        return self._open[1]

    def unanswered(self) -> int:
        """Requests that were accepted and are not answered yet."""
        return self._found[0].unanswered if self._found else 0

    @property
    def _open(self) -> tuple[Service, Runtime]:
        if self._found is None:
            raise Unavailable("the server is starting")
        return self._found

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Open the device, load the models in the background, and close everything in the end."""
        with only_worker(worker_parent()):
            async with self._serving():
                yield

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        keep_large_blocks()
        source = self._source()
        config = await asyncio.to_thread(source.__enter__)
        watchdog = Watchdog(config.server)
        try:
            logs.configure(config.server.log_format, config.server.log_level)
            watchdog.start()
            self._prepare(config)
            device = self._opener(config)
            config.fit(device.unit, device.granules)
            service, runtime = assemble(config, device)
            self._found = service, runtime
            self._shared = cors.allow(self._answer, config.server.cors_origins)
            log_compilation()
            docs.document(), admin_docs.document()
            await runtime.start()
            late: list[Timer] = []
            restore = _drain_on_sigterm(runtime, lambda: late.append(_end_in_time(config.server, self._abandon)))
            tasks = [asyncio.create_task(freeze(runtime)), asyncio.create_task(self._leave(runtime))]
            try:
                yield
            finally:
                restore()
                await runtime.close()
                for timer in late:
                    timer.cancel()
                for task in tasks:
                    task.cancel()
        finally:
            await watchdog.close()
            self._found = None
            await asyncio.to_thread(source.__exit__, None, None, None)

    async def _leave(self, runtime: Runtime) -> None:
        await runtime.device_gone.wait()
        await asyncio.sleep(EXIT_DELAY)
        self._abandon(NEEDS_RESTART)


def assemble(config: Config, device: Device, read: Read | None = None) -> tuple[Service, Runtime]:
    """Both sides in one process; `read` makes engines of model files."""
    frontends = {name: open_local(tenant, only=len(config.tenants) == 1) for name, tenant in config.tenants.items()}
    service = Service(config, [frontend.tenant for frontend in frontends.values()])
    return service, Runtime(config, device, frontends, service.set_state, read)


def _in_lines(send: Send) -> Send:
    """Have the operator's mistakes told as their lines, not as a traceback of the framework's."""

    async def tell(message: MutableMapping[str, Any]) -> None:
        error = sys.exception()
        if message["type"] == "lifespan.startup.failed" and isinstance(error, MISTAKES):
            about = "the configuration cannot be served:\n" if isinstance(error, ConfigError | PartitionError) else ""
            message = {**message, "message": f"greenlane: {about}{error}"}
        await send(message)

    return tell


def log_compilation() -> None:
    """Log whether the hot path runs as machine code, from a wheel that was built with GREENLANE_COMPILE=1."""
    interpreted = (ring.__file__ or "").endswith(".py")
    log.info("hot path: %s", "interpreted Python" if interpreted else "compiled to machine code")


def configuration(path: str | None) -> AbstractContextManager[Config]:
    """The configuration in a file, or the demo's. Blocks. Raises ConfigError."""
    return nullcontext(load(Path(path))) if path else demo.configuration()


def _end_in_time(config: ServerConfig, abandon: Callable[[int], object]) -> Timer:
    return end_in_time(config.drain_grace, config.drain_timeout, lambda: abandon(0))


def _drain_on_sigterm(runtime: Runtime, told: Callable[[], object]) -> Callable[[], None]:
    """Make SIGTERM call `told`, drain, and only then do what it did; a second one does that at once. Returns how to undo this.

    So does SIGHUP, which comes when a terminal closes, unless it is ignored, as under nohup.
    """
    if current_thread() is not main_thread():
        return lambda: None
    loop = asyncio.get_running_loop()
    before: Any = signal.getsignal(signal.SIGTERM)
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        told()
        await runtime.drain(runtime.config.server.drain_grace)
        before(signal.SIGTERM, None)

    def on_signal(number: int, frame: Any) -> None:
        if draining:
            before(signal.SIGTERM, frame)
        else:
            loop.call_soon_threadsafe(lambda: draining.append(loop.create_task(drain())))

    if not callable(before):
        return lambda: None
    signal.signal(signal.SIGTERM, on_signal)
    if may_hang_up := signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, on_signal)

    def restore() -> None:
        signal.signal(signal.SIGTERM, before)
        if may_hang_up:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

    return restore


app = Application(lambda: configuration(os.environ.get("GREENLANE_CONFIG")), prepare=single_process.prepare)
