"""Makes uvicorn use the protocols of this package where it is started with the application alone: `uvicorn server.app:app`.

An application has no other way to choose the protocol: uvicorn chooses before it imports the application.
"""

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .connection import HttpConnection
from .infer import Infer
from .uvicorn_protocol import JsonHttpToolsProtocol


def install() -> None:
    """Replace uvicorn's httptools protocol: by `HttpConnection` where that can be, else by `JsonHttpToolsProtocol`."""
    HttpToolsProtocol.__new__ = staticmethod(_make)  # type: ignore[method-assign, assignment]


def _make(
    kind: type[HttpToolsProtocol],
    config: Config,
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


def _infer_of(config: Config) -> Infer | None:
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
