"""A server as the ingress and the coordinator see one: what it was sent, and answers that a test scripts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from greenlane.ray.coordinator import Listed


@dataclass
class Upstream:
    """`seen`: method, path with query, headers and body of each request. `shares`: granules of `total` that tenants have.

    PUT /admin/partitions is refused as often as `refusals` says. All but /admin/partitions goes to `answer`.
    """

    listed: Listed
    shares: dict[str, int]
    total: int = 4
    refusals: list[bool] = field(default_factory=list)
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    seen: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    puts: list[dict[str, int]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/admin/partitions":
            if request.headers.get("authorization") != f"Bearer {self.listed.key}":
                return web.json_response({"error": "send the admin key"}, status=401)
            if request.method == "PUT":
                self.puts.append(await request.json())
                if self.refusals and self.refusals.pop(0):
                    return web.json_response({"error": "a tenant does not halt"}, status=409)
                self.shares |= self.puts[-1]
            partitions = {name: {"granules": list(range(count))} for name, count in self.shares.items()}
            return web.json_response({"granules": self.total, "partitions": partitions})
        if self.answer:
            return await self.answer(request)
        body = await request.read()
        self.seen.append((request.method, request.raw_path, {k.lower(): v for k, v in request.headers.items()}, body))
        return web.Response(body=body, headers={"X-Number": str(self.listed.number)})


@asynccontextmanager
async def upstream(number: int, **shares: int) -> AsyncIterator[Upstream]:
    """One that listens until left."""
    found: list[Upstream] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        return await found[0].handle(request)

    server = web.Server(handle, auto_decompress=False)
    runner = web.ServerRunner(server, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    found.append(Upstream(Listed(f"id{number}", number, f"http://127.0.0.1:{port}", f"own-{number}"), dict(shares)))
    try:
        yield found[0]
    finally:
        await runner.cleanup()


class Exchange:
    """One request to an ASGI application, and what it sends: `status`, `headers`, and `chunks` as they come."""

    def __init__(self, app: Any, method: str, path: str, headers: dict[str, str] | None = None, *body: bytes) -> None:
        path, _, query = path.partition("?")
        sent = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        self.scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": sent}
        self.scope["query_string"] = query.encode()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self.content = b""
        self.received = 0
        self._app, self._body = app, body or (b"",)

    async def run(self) -> "Exchange":
        await self._app(self.scope, self._receive, self._send)
        return self

    async def _receive(self) -> dict[str, Any]:
        chunk = self._body[self.received]
        self.received += 1
        return {"type": "http.request", "body": chunk, "more_body": self.received < len(self._body)}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif chunk := message["body"]:
            self.content += chunk
            self.chunks.put_nowait(chunk)
