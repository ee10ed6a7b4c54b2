"""Passes requests on to servers as they come, byte for byte, and answers the calls that concern all servers.

A request goes to a server of its tenant, and of those to the one with the fewest requests.
"""

import asyncio
import hashlib
import json
import logging
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any, Protocol

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from .coordinator import Listed, Listing, Outcome

log = logging.getLogger("greenlane.ray")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

LIST_EVERY = 0.2
"""Seconds between two questions for the list of servers."""
CONNECT_TIMEOUT = 5.0
"""Seconds until a server counts as not reached."""
MOST_ADMIN_BODY = 1 << 20
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding upgrade".split()
)
"""Headers of one connection, which no proxy passes on (RFC 9110, 7.6.1)."""
_OF_REQUESTS = _HOP_BY_HOP | {b"expect"}  # Ray Serve's proxy has answered "100 Continue" already.
_NOT_REACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""What aiohttp raises while it connects: nothing of the request was sent."""
_NOT_ADDED = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
"""Headers that aiohttp would add."""


class AllServers(Protocol):
    """The coordinator, as an ingress sees it."""

    async def servers(self) -> Listing:
        """Those that serve."""

    async def partitions(self) -> Outcome:
        """What each of them has."""

    async def repartition(self, counts: Mapping[str, int]) -> Outcome:
        """Give tenants these granules on all of them or none."""


class Tenants:
    """Finds the tenant of a request by its headers, as the servers do, which then decide whether it is served."""

    def __init__(self, toml: str) -> None:
        document = tomllib.loads(toml)
        self._default = document.get("server", {}).get("default_tenant")
        self._by_key = {
            digest.lower(): name for name, each in document["tenants"].items() for digest in each.get("keys_sha256", ())
        }

    def identify(self, authorization: str | None, name: str | None) -> str | None:
        """Its name, or None where the request shows none, or a key that no tenant has."""
        if authorization and self._by_key:
            return self._by_key.get(digest_of_bearer(authorization))
        return name or self._default


def digest_of_bearer(authorization: str) -> str:
    """The digest of the key in a header `Authorization: Bearer KEY`; of no key where it is something else."""
    scheme, _, key = authorization.partition(" ")
    return hashlib.sha256(key.strip().encode("latin-1", "replace")).hexdigest() if scheme.lower() == "bearer" else ""


class Routes:
    """The servers as one ingress sees them. `places`: numbers of the servers of a tenant, all where it is not named."""

    def __init__(self, places: Mapping[str, Collection[int]]) -> None:
        self._places = places
        self._servers: dict[str, Listed] = {}
        self._in_flight: dict[str, int] = {}
        self._unreachable: set[str] = set()
        self._failed: set[str] = set()
        self._turn = 0

    def update(self, listing: Listing) -> None:
        """Use these servers, and those of before while the listing is not complete; those that were not reached too."""
        listed = {server.id: server for server in listing.servers}
        kept = {} if listing.complete else {id: each for id, each in self._servers.items() if id not in listing.gone}
        self._servers = kept | listed
        self._unreachable.clear()
        self._failed &= self._servers.keys()

    def servers_of(self, tenant: str | None) -> list[Listed]:
        """Where a tenant is served, whether reachable or not."""
        numbers = self._places.get(tenant or "")
        return [server for server in self._servers.values() if numbers is None or server.number in numbers]

    def choose(self, tenant: str | None, tried: Collection[str] = ()) -> Listed | None:
        """The server with the fewest requests of those that were not tried, in turn where these are equal."""
        found = [server for server in self.servers_of(tenant) if server.id not in tried]
        found = [server for server in found if server.id not in self._unreachable] or found
        if not found:
            return None
        self._turn += 1
        start = self._turn % len(found)
        return min(found[start:] + found[:start], key=lambda server: self._in_flight.get(server.id, 0))

    def begin(self, server: Listed) -> None:
        """Count a request to it."""
        self._in_flight[server.id] = self._in_flight.get(server.id, 0) + 1

    def end(self, server: Listed) -> None:
        """The same once it has ended."""
        self._in_flight[server.id] -= 1
        if not self._in_flight[server.id]:
            del self._in_flight[server.id]

    def could_not_reach(self, server: Listed) -> bool:
        """Choose others before it, until the next list. Returns whether it is the first time since it was listed."""
        first = server.id not in self._failed
        self._unreachable.add(server.id)
        self._failed.add(server.id)
        return first


class Ingress:
    """An ASGI application. Belongs to the event loop. `admin_digest`: of the configuration's admin key."""

    def __init__(self, tenants: Tenants, routes: Routes, coordinator: AllServers, admin_digest: str | None) -> None:
        self._tenants = tenants
        self._routes = routes
        self._coordinator = coordinator
        self._admin_digest = admin_digest
        self._http: aiohttp.ClientSession | None = None
        self._listing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Know the servers from now on. Waits for a coordinator that knows all of them."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
        self._http = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=_NOT_ADDED,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        while not (listing := await self._coordinator.servers()).complete:
            await asyncio.sleep(LIST_EVERY)
        self._routes.update(listing)
        self._listing = asyncio.create_task(self._list())

    async def stop(self) -> None:
        """Close its connections to servers."""
        if self._listing:
            self._listing.cancel()
            await asyncio.wait([self._listing])
        if self._http:
            await self._http.close()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["path"]
        if path == "/admin" or path.startswith("/admin/"):
            await self._administer(scope, receive, send)
            return
        tenant = self._tenants.identify(_header(scope, b"authorization"), _header(scope, b"x-tenant"))
        if scope["method"] == "POST" and path.startswith("/v2/repository/models/"):
            await self._load_everywhere(scope, receive, send, tenant)
        else:
            await self._pass_on(scope, receive, send, tenant)

    async def _list(self) -> None:
        while True:
            await asyncio.sleep(LIST_EVERY)
            try:
                self._routes.update(await self._coordinator.servers())
            except Exception as error:  # It is being replaced; the servers stay those of its last list.
                log.warning("the list of servers is not known: %s", error)

    async def _pass_on(self, scope: Mapping[str, Any], receive: Receive, send: Send, tenant: str | None) -> None:
        """Try servers until one is reached. Nothing of the body has been read before that, so it can be sent to the next."""
        tried: set[str] = set()
        target = scope.get("raw_path") or scope["path"].encode()
        while (server := self._routes.choose(tenant, tried)) is not None:
            self._routes.begin(server)
            try:
                await self._exchange(scope, receive, send, server, target)
                return
            except _NOT_REACHED as error:
                if self._routes.could_not_reach(server):
                    log.warning("server %d could not be reached: %s", server.number, error)
                tried.add(server.id)
            finally:
                self._routes.end(server)
        await _answer(send, 503, "no server of this tenant is ready; the request has reached none", [(b"retry-after", b"1")])

    async def _exchange(
        self, scope: Mapping[str, Any], receive: Receive, send: Send, server: Listed, target: bytes, key: str | None = None
    ) -> None:
        """One request to one server. Raises one of _NOT_REACHED, before any of the body was read; otherwise it is answered.

        `key` takes the place of the client's.
        """
        assert self._http
        kept = _kept(scope["headers"], _OF_REQUESTS)
        headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in kept)
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
        body = _body(receive) if chunked or headers.get("content-length", "0") != "0" else None
        query = b"?" + scope["query_string"] if scope.get("query_string") else b""
        url, started = URL(server.url + (target + query).decode("latin-1"), encoded=True), False
        try:
            async with self._http.request(scope["method"], url, headers=headers, data=body, allow_redirects=False) as answer:
                sent = _kept(answer.raw_headers, _HOP_BY_HOP)
                await send({"type": "http.response.start", "status": answer.status, "headers": sent})
                started = True
                async for chunk in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except _NOT_REACHED:
            raise
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            log.warning("server %d ended with a request: %r", server.number, error)
            if started:  # A client that gets half an answer has to see that it is not whole.
                raise
            await _answer(send, 502, f"server {server.number} ended before it answered; it may have run the request")

    async def _load_everywhere(self, scope: Mapping[str, Any], receive: Receive, send: Send, tenant: str | None) -> None:
        """A load or unload on each server of the tenant, one after another, until one refuses. Nothing is undone."""
        assert self._http
        content = await _small_body(receive, send)
        if content is None:
            return
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in _kept(scope["headers"], _OF_REQUESTS)]
        target, done = scope.get("raw_path") or scope["path"].encode(), list[str]()
        for server in self._routes.servers_of(tenant):
            url = URL(server.url + target.decode("latin-1"), encoded=True)
            changed = f"changed before it: {', '.join(done) or 'none'}"
            try:
                async with self._http.post(url, headers=headers, data=content) as answer:
                    if answer.status != 200:
                        await _answer(send, answer.status, f"server {server.number}: {await answer.text()} ({changed})")
                        return
            except (aiohttp.ClientError, TimeoutError) as error:
                await _answer(send, 502, f"server {server.number} did not answer: {error!r} ({changed})")
                return
            done.append(str(server.number))
        status = 200 if done else 503
        await _answer_outcome(send, Outcome(status, {"servers": done}))

    async def _administer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if self._admin_digest is None:
            await _answer(send, 401, "without server.admin_key_sha256 the admin API is not served through Ray Serve")
            return
        if digest_of_bearer(_header(scope, b"authorization") or "") != self._admin_digest:
            await _answer(send, 401, "send Authorization: Bearer KEY with the admin key")
            return
        method, path = scope["method"], scope["path"]
        if path == "/admin/partitions" and method == "GET":
            await _answer_outcome(send, await self._coordinator.partitions())
        elif path == "/admin/partitions" and method == "PUT":
            await self._repartition(receive, send)
        elif path.startswith("/admin/servers/"):
            await self._one_server(scope, receive, send)
        else:
            await _answer(send, 404, "expected /admin/partitions, of all servers, or /admin/servers/NUMBER/PATH, of one")

    async def _repartition(self, receive: Receive, send: Send) -> None:
        content = await _small_body(receive, send)
        if content is None:
            return
        try:
            counts = json.loads(content)
        except ValueError:
            counts = None
        if not isinstance(counts, dict) or not counts:
            await _answer(send, 400, 'the request body names no tenant; expected granules by tenant, such as {"acme": 2}')
            return
        await _answer_outcome(send, await self._coordinator.repartition(counts))

    async def _one_server(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Anything of one server, with its own admin key: /admin/servers/0/metrics is its /metrics."""
        number, _, _ = scope["path"].removeprefix("/admin/servers/").partition("/")
        server = next((each for each in self._routes.servers_of(None) if str(each.number) == number), None)
        if server is None:
            numbers = ", ".join(str(each.number) for each in self._routes.servers_of(None))
            await _answer(send, 404, f"there is no server {number!r}; there are {numbers or 'none'}")
            return
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        target = b"/" + raw.partition(b"/admin/servers/" + number.encode())[2].removeprefix(b"/")
        try:
            await self._exchange(scope, receive, send, server, target, server.key)
        except _NOT_REACHED as error:
            await _answer(send, 503, f"server {number} could not be reached: {error}")


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    """A request's body as it arrives. Raises ClientConnectionError if the client goes, so that the server sees it go too."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise aiohttp.ClientConnectionError("the client disconnected")
        if chunk := message.get("body", b""):
            yield chunk
        more = message.get("more_body", False)


async def _small_body(receive: Receive, send: Send) -> bytes | None:
    """The whole body, or None for one that is too large, which has been answered then."""
    content = bytearray()
    async for chunk in _body(receive):
        content += chunk
        if len(content) > MOST_ADMIN_BODY:
            await _answer(send, 413, f"the request body has more than {MOST_ADMIN_BODY} bytes")
            return None
    return bytes(content)


async def _answer(send: Send, status: int, error: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await _answer_outcome(send, Outcome(status, {"error": error}), headers)


async def _answer_outcome(send: Send, outcome: Outcome, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    content = json.dumps(outcome.document).encode()
    sent = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()), *(headers or ())]
    await send({"type": "http.response.start", "status": outcome.status, "headers": sent})
    await send({"type": "http.response.body", "body": content})


def _kept(headers: Any, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """Without those of one connection, and those that the Connection header names."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {each.strip().lower() for name, value in pairs if name == b"connection" for each in value.split(b",")}
    return [(name, value) for name, value in pairs if name not in dropped and name not in named]


def _header(scope: Mapping[str, Any], wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)
