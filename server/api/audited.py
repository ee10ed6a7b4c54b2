"""An application whose calls that change something are written to the audit."""

from collections.abc import Awaitable, Callable

from ..http.asgi import Application, Message
from ..tenants import audit
from ..tenants.model_changes import is_change

_READS = ("GET", "HEAD", "OPTIONS")


def audited(application: Application) -> Application:
    """The application with a line for each call below /admin, and each load and unload; not for calls that only read.

    One that is refused for lack of a key has a line where it is refused.
    """

    async def answer(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http" or scope["method"] in _READS or not _is_watched(scope["path"]):
            await application(scope, receive, send)
            return

        async def send_and_record(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] != 401:
                given = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
                audit.call(scope, given, message["status"])
            await send(message)

        await application(scope, receive, send_and_record)

    return answer


def _is_watched(path: str) -> bool:
    return path.startswith("/admin/") or is_change(path)
