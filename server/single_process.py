"""`uvicorn server.app:app`: one process on uvicorn's socket. `python -m server` opens the sockets itself and gives each tenant
its own HTTP process.

Settings that cannot be honoured here are refused, or named in a warning. An application cannot choose uvicorn's protocol,
which is chosen before it is imported, so `prepare` replaces it. And a second worker of the same parent, as under
`uvicorn --workers 2`, is refused: it accepts from the same socket, and would carve the same granules for the same tenants.
A worker holds an abstract Unix socket named after its parent's process id, which the kernel frees however the worker ends.
A worker that replaces another one, as with `--reload`, finds the name free.
"""

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from typing import Any

from uvicorn.config import Config as UvicornConfig
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from partitions.mps import stay_outside

from .config.schema import Config
from .config.server import ServerConfig
from .config.tables import ConfigError, dotted
from .http.connection import HttpConnection
from .http.infer import Infer
from .http.uvicorn_protocol import JsonHttpToolsProtocol

log = logging.getLogger("greenlane")

SWITCH_INTERVAL = 0.001
"""Seconds after which a thread must release the GIL if another waits: the longest wait of a completion while the event loop is
busy. Python's default is 5 ms. Below 1 ms the waiting itself costs more, as each wait takes a timer."""


def prepare(config: Config) -> None:
    """Configure this process, and log one warning with all settings that are ignored; at the start, and at each reload.

    Raises ConfigError for several devices, and for a tenant's own port, which must not be ignored: it keeps other clients away
    from the tenant.
    """
    if problems := list(_refused(config)):
        raise ConfigError(problems)
    sys.setswitchinterval(SWITCH_INTERVAL)
    stay_outside()
    install()
    if lines := list(_not_honoured(config)):
        log.warning("%s", "\n  ".join([f"not all of {config.source} is honoured by uvicorn server.app:app:", *lines]))


def _refused(config: Config) -> Iterator[str]:
    if len(config.named_devices) > 1:
        names = ", ".join(dotted(("devices", name)) for name in config.named_devices)
        why = "uvicorn server.app:app is one process, which has one device"
        yield f"{config.source}: {names}: {len(config.named_devices)} devices, but {why}; serve them with `greenlane`"
    if any(each.mps == "on" for each in config.named_devices.values()):
        why = "uvicorn server.app:app is one process for all tenants"
        yield f'{config.source}: device.mps: "on", but {why}; serve them with `greenlane`, or leave it out'
    if config.models.python and len(config.tenants) > 1:
        why = "functions of models run in the process of their tenant, and uvicorn server.app:app has one for all tenants"
        yield f"{config.source}: models.python: true, but {why}; serve them with `greenlane`, or leave it out"
    for name, tenant in config.tenants.items():
        if tenant.port is not None:
            key = dotted(("tenants", name, "port"))
            why = "uvicorn server.app:app listens on uvicorn's own socket alone, so the tenant has none of its own"
            yield f"{config.source}: {key}: {tenant.port}, but {why}; serve it with `greenlane`, or leave it out"


def _not_honoured(config: Config) -> Iterator[str]:
    server, default = config.server, ServerConfig()
    if len(config.tenants) > 1:
        yield (
            "tenants: the HTTP of all of them shares one process and one event loop here, so that large or many requests of "
            "one delay the others'; `greenlane` gives each an HTTP process of its own"
        )
    assigned = [dotted(("tenants", name, "front_cores")) for name, tenant in config.tenants.items() if tenant.front_cores]
    if server.front_cores != default.front_cores:
        assigned.insert(0, "server.front_cores")
    if assigned:
        yield f"{', '.join(assigned)}: there are no HTTP processes to put on cores"
    if several := [name for name, tenant in config.tenants.items() if tenant.http_processes not in (1, "auto")]:
        keys = ", ".join(dotted(("tenants", name, "http_processes")) for name in several)
        yield f"{keys}: here all HTTP is in one process; `greenlane` starts several on a GPU"
    if limited := [
        dotted(("tenants", name, "max_connections")) for name, each in config.tenants.items() if each.max_connections
    ]:
        yield f"{', '.join(limited)}: connections belong to no tenant in one process; uvicorn's --limit-concurrency is for all"
    if server.keep_alive != default.keep_alive:
        yield "server.keep_alive: uvicorn closes idle connections after its --timeout-keep-alive, which is 5 s by default"
    if (server.host, server.port) != (default.host, default.port):
        yield f"server.host and server.port, {server.host}:{server.port}: uvicorn listens where its --host and --port say"


class AnotherWorker(Exception):
    """Another worker of the same parent serves already."""


def worker_parent() -> int | None:
    """The process id of the parent that started this process as one of its workers; None if it is no worker."""
    parent = parent_process()
    return parent.pid if parent else None


@contextmanager
def only_worker(parent: int | None) -> Iterator[None]:
    """Hold the name of this parent's only worker; with None do nothing. Raises AnotherWorker if another one holds it."""
    if parent is None:
        yield
        return
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0greenlane-worker-of-{parent}")  # An abstract name of Linux, without a file.
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise AnotherWorker(
                "another worker of the same uvicorn serves already, and every worker would carve the same device; "
                "start one: without --workers, and without WEB_CONCURRENCY in the environment"
            ) from None
        yield


def install() -> None:
    """Replace uvicorn's httptools protocol: by `HttpConnection` where that can be, else by `JsonHttpToolsProtocol`."""
    HttpToolsProtocol.__new__ = staticmethod(_make)  # type: ignore[method-assign, assignment]


def _make(
    kind: type[HttpToolsProtocol],
    config: UvicornConfig,
    server_state: Any,
    app_state: dict[str, Any],
    _loop: asyncio.AbstractEventLoop | None = None,
) -> asyncio.Protocol:
    """As `__new__`: what is not a `kind` is returned as it is, without a call of `__init__`."""
    if issubclass(kind, JsonHttpToolsProtocol):
        return object.__new__(kind)
    if (infer := _infer_of(config)) is not None:
        return HttpConnection(infer, config.loaded_app, None, config, server_state, app_state, _loop)
    return object.__new__(JsonHttpToolsProtocol)


def _infer_of(config: UvicornConfig) -> Infer | None:
    """What answers inferences without ASGI; None if an option of uvicorn, or another application around it, needs ASGI."""
    if not config.loaded:
        config.load()
    counted = config.limit_concurrency is not None or config.limit_max_requests is not None
    if config.access_log or counted or config.root_path or config.is_ssl or config.uds:
        return None
    application = config.loaded_app
    if isinstance(application, ProxyHeadersMiddleware):
        application = application.app
    infer = getattr(application, "infer", None)
    return infer if isinstance(infer, Infer) else None
