"""Web pages of other origins that may call the models' API: for browsers, which ask before they let a page read an answer."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.middleware.cors import CORSMiddleware

from ..http.asgi import Application, Message

_EXPOSED = ["inference-header-content-length", "retry-after", "server-timing", "x-request-id"]
"""What a page may read of an answer."""
_REMEMBERED = 600
"""Seconds for which a browser need not ask again."""


def allow(application: Application, origins: Sequence[str]) -> Application:
    """The same application, which pages of these origins may call, but for administration, metrics, and load and unload."""
    if not origins:
        return application
    shared = CORSMiddleware(application, origins, "*", "*", expose_headers=_EXPOSED, max_age=_REMEMBERED)

    async def answer(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        origin = next((value for name, value in scope.get("headers", ()) if name == b"origin"), None)
        is_asked = origin is not None and _is_shared(scope["path"]) and shared.is_allowed_origin(origin.decode("latin-1"))
        await (shared if is_asked else application)(scope, receive, send)

    return answer


def _is_shared(path: str) -> bool:
    return path.startswith("/v2") and not path.startswith("/v2/repository/models/")
