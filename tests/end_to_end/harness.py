"""A whole server on a loopback port, in a thread of the test's own process."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from partitions import Device
from server.app import Application, open_configured
from server.config.schema import Config, DeviceConfig, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from server.control.controller import Controller
from server.device.runtime import Runtime
from server.http.connection import HttpConnection
from server.http.uvicorn_protocol import JsonHttpToolsProtocol
from server.tenants.service import Service

T = TypeVar("T")
LOGGERS = {
    logger: (tuple(logger.handlers), logger.level, logger.propagate)
    for logger in map(logging.getLogger, ("greenlane", "uvicorn"))
}
"""The loggers that a server configures, with handlers, level and `propagate` of before any: servers need not end in turn."""
PATIENCE = 200.0
"""Seconds after which a hanging test fails: a server on a slow GPU host took 55 to have its kernels compiled."""
ARENA = 32 << 20
"""Bytes of host memory of a tenant on a simulated GPU: there, as on a GPU, all of it is populated and page-locked."""


class Served:
    """A running server: its address, and for tests that look inside its two sides."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.loop: asyncio.AbstractEventLoop
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def controller(self) -> Controller:
        return self.application.controller()

    @property
    def runtime(self) -> Runtime:
        """The device side, which is in this process."""
        (device,) = self.controller.devices
        (runtime,) = device.distinct()
        assert isinstance(runtime, Runtime)
        return runtime

    @property
    def service(self) -> Service:
        return self.application.service()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, served: Served) -> None:
        super().__init__(config)
        self.served = served
        self.up = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
            if self.servers:
                self.served.port = self.servers[0].sockets[0].getsockname()[1]
            self.served.loop = asyncio.get_running_loop()
        finally:
            self.up.set()


@contextmanager
def serving(
    config: Config, device: Device | None = None, direct: bool = False, abandon: Callable[[int], object] = os._exit
) -> Iterator[Served]:
    """Serve a configuration; every model has been tried when this returns, and everything is closed afterwards.

    The arguments are those of `starting`.
    """
    with starting(config, device, direct, abandon) as served:
        served.call(served.controller.loaded())
        yield served


@contextmanager
def starting(
    config: Config, device: Device | None = None, direct: bool = False, abandon: Callable[[int], object] = os._exit
) -> Iterator[Served]:
    """The same, but its models may not be loaded yet when this returns.

    `direct`: whether HttpConnection answers inferences without ASGI, as under `python -m server`.
    """
    opener = (lambda _: device) if device else open_configured
    application = Application(lambda: nullcontext(config), opener, abandon, read=lambda: config)
    served = Served(application)
    http: Any = partial(HttpConnection, application.infer, application, None) if direct else JsonHttpToolsProtocol
    settings = uvicorn.Config(application, port=0, http=http, log_config=None, access_log=False, timeout_graceful_shutdown=30)
    server = _Server(settings, served)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        assert server.up.wait(PATIENCE)
        assert server.started, "the server did not start; its log says why"
        yield served
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        for logger, (handlers, level, propagate) in LOGGERS.items():  # A server has the log to itself; pytest wants it back.
            logger.handlers, logger.propagate = list(handlers), propagate
            logger.setLevel(level)
    assert not thread.is_alive(), "the server did not stop"


def cores() -> list[int]:
    """The cores this process may use."""
    return sorted(os.sched_getaffinity(0))


def configuration(root: Path, *tenants: TenantConfig, **server: Any) -> Config:
    """A configuration in code; without tenants, one called acme that is served everything on one core."""
    tenants = tenants or (TenantConfig(name="acme", granules=1, models=("*",)),)
    settings = {"default_tenant": tenants[0].name, "drain_grace": 0.0, "watchdog": 0.0, **server}
    return Config(
        server=ServerConfig(**settings),
        device=DeviceConfig(),
        models=ModelsConfig(repository=root),
        tenants={tenant.name: tenant for tenant in tenants},
        source="test",
    )
