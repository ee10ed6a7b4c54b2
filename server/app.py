"""The composition root: the only place that sees the whole configuration and the environment.

`uvicorn server.app:app` serves what GREENLANE_CONFIG names, or the demo. Inference requests go to `Infer`; everything
else goes to the framework.
"""

import asyncio
import gc
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from engines import EngineError, has_tensorrt
from partitions import Device, PartitionError, open_device

from . import admin, demo, logs, metrics, routes
from .config import Config, load
from .departures import Receive
from .errors import BadRequest, NotFound, RequestError, Unavailable, WrongMethod, answer
from .infer import Infer, Send, is_infer
from .runtime import Runtime

log = logging.getLogger("greenlane")

Source = Callable[[], AbstractContextManager[Config]]

_ROUTERS = (routes.router, admin.router, metrics.router)


def open_configured(config: Config) -> Device:
    """The device that a configuration asks for; `auto` is a GPU only where there is TensorRT to serve from it.

    Raises DeviceUnavailable.
    """
    backend = config.device.backend
    if backend == "auto" and not has_tensorrt():
        log.info("the device is the CPU: TensorRT is not installed")
        backend = "cpu"
    return open_device(backend, config.device.cores, config.device.index)


class Application:
    """Greenlane as an ASGI application; its runtime lives from lifespan startup to shutdown.

    `source` gives the configuration; it is called on a thread, and what it holds is released after the runtime.
    `opener` gives the device that the configuration asks for.
    """

    def __init__(self, source: Source, opener: Callable[[Config], Device] = open_configured) -> None:
        self._source = source
        self._opener = opener
        self._found: Runtime | None = None
        self.infer = Infer(self.runtime)
        self._web = _web(self)

    def __repr__(self) -> str:
        return f"<Application {self._found!r}>"

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_infer(scope["path"]):
            await self.infer(scope, receive, send)
        else:
            await self._web(scope, receive, send)

    def runtime(self) -> Runtime:
        """The runtime. Raises Unavailable while there is none."""
        if self._found is None:
            raise Unavailable("the server is starting")
        return self._found

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Open the device, load the models in the background, and close everything in the end."""
        source = self._source()
        config = await asyncio.to_thread(source.__enter__)
        try:
            logs.configure(config.server.log_format, config.server.log_level)
            self._found = runtime = Runtime(config, self._opener(config))
            await runtime.start()
            restore = _drain_on_sigterm(runtime)
            freezing = asyncio.create_task(_freeze(runtime))
            try:
                yield
            finally:
                restore()
                await runtime.close()
                await freezing
        finally:
            self._found = None
            await asyncio.to_thread(source.__exit__, None, None, None)


async def _freeze(runtime: Runtime) -> None:
    """Once everything is loaded, keep the garbage collector off it: a full collection would stop every tenant for 35 ms."""
    await runtime.loaded()
    gc.collect()
    gc.freeze()


def configuration(path: str | None) -> AbstractContextManager[Config]:
    """The configuration in a file, or the demo's. Blocks. Raises ConfigError."""
    return nullcontext(load(Path(path))) if path else demo.configuration()


def _web(application: Application) -> FastAPI:
    lifespan = application.lifespan
    web = FastAPI(title="Greenlane", lifespan=lifespan, redirect_slashes=False, docs_url=None, redoc_url=None, openapi_url=None)
    web.state.runtime = application.runtime
    for router in _ROUTERS:
        web.include_router(router)
    for kind in (RequestError, EngineError, PartitionError, HTTPException, RequestValidationError, Exception):
        web.add_exception_handler(kind, _on_error)
    return web


def _on_error(request: Request, error: Exception) -> JSONResponse:
    request_id = uuid.uuid4().hex
    told = answer(_translate(request, error), request_id)
    if told.status == 500:
        log.error("%s %s: %s", request.method, request.url.path, error, extra={"request_id": request_id})
    return JSONResponse({"error": told.text}, told.status, dict(told.headers))


def _translate(request: Request, error: Exception) -> Exception:
    """The framework's own errors as ours."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return BadRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    if isinstance(error, HTTPException) and error.status_code == 405:
        return WrongMethod(request.method, _allowed(request))
    if isinstance(error, HTTPException):
        return NotFound(f"there is nothing at {request.url.path}")
    return error


def _allowed(request: Request) -> str:
    """The methods of a path; each may be a route of its own, and the framework names those of the first only."""
    routes = [route for router in _ROUTERS for route in router.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes if isinstance(route, Route) for method in route.methods or ()}))


def _drain_on_sigterm(runtime: Runtime) -> Callable[[], None]:
    """Make SIGTERM drain first and only then do what it did; a second one does that at once. Returns how to undo this."""
    if current_thread() is not main_thread():
        return lambda: None
    loop = asyncio.get_running_loop()
    before: Any = signal.getsignal(signal.SIGTERM)
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        await runtime.drain(runtime.config.server.drain_grace)
        before(signal.SIGTERM, None)

    def on_signal(number: int, frame: Any) -> None:
        if draining:
            before(number, frame)
        else:
            loop.call_soon_threadsafe(lambda: draining.append(loop.create_task(drain())))

    if not callable(before):
        return lambda: None
    signal.signal(signal.SIGTERM, on_signal)
    return lambda: (signal.signal(signal.SIGTERM, before), None)[1]


app = Application(lambda: configuration(os.environ.get("GREENLANE_CONFIG")))
