"""Cross-origin requests: which web pages may call the inference API. Browsers ask before a page may read an answer."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.middleware.cors import CORSMiddleware

from ..http.asgi import Application, Message

_EXPOSED_HEADERS = ["inference-header-content-length", "retry-after", "server-timing", "x-request-id"]
"""What pages may read of an answer, beyond what browsers always let them."""
_MAX_AGE = 600
"""Seconds for which a browser may remember the answer to a preflight request."""


def allow(application: Application, origins: Sequence[str]) -> Application:
    """The application with CORS for these origins, except for administration, metrics, and loading and unloading of models."""
    if not origins:
        return application
    shared = CORSMiddleware(application, origins, "*", "*", expose_headers=_EXPOSED_HEADERS, max_age=_MAX_AGE)

    async def answer(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        origin = next((value for name, value in scope.get("headers", ()) if name == b"origin"), None)
        is_allowed = origin is not None and _is_shared(scope["path"]) and shared.is_allowed_origin(origin.decode("latin-1"))
        await (shared if is_allowed else application)(scope, receive, send)

    return answer


class Shared:
    """An application with CORS for the origins that `set` was called with last."""

    def __init__(self, application: Application, origins: Sequence[str]) -> None:
        self._application = application
        self._answer = allow(application, origins)

    def __repr__(self) -> str:
        return f"<Shared {self._application!r}>"

    def set(self, origins: Sequence[str]) -> None:
        """Allow these origins from now on."""
        self._answer = allow(self._application, origins)

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        await self._answer(scope, receive, send)


def _is_shared(path: str) -> bool:
    return path.startswith("/v2") and not path.startswith("/v2/repository/models/")
