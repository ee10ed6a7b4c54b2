"""Asks the application of this process as a client of HTTP would: for protocol handlers that speak something else."""

from collections.abc import Callable, Mapping

from ..http import asgi
from ..http.exchange import Call


async def ask(
    application: asgi.Application, method: str, path: str, headers: Mapping[str, str], body: bytes, client: tuple[str, int]
) -> tuple[int, bytes]:
    """The status and body of the answer. `path` is percent-encoded, names of headers are in lower case."""

    async def read(limit: int, grow: Callable[[int], None] | None = None) -> bytes:
        return body

    fields = {name.encode(): value.encode("latin-1", "replace") for name, value in headers.items()}
    fields[b"content-length"] = b"%d" % len(body)
    reply = await asgi.respond(application, Call(method, path.encode(), b"", fields, read, None, client))
    return reply.status, reply.body
