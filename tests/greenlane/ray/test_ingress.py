"""The ingress: bytes both ways, answers in parts as they come, and what becomes of requests whose server goes away."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from greenlane.ray.coordinator import Listed, Listing, Outcome
from greenlane.ray.ingress import Ingress, Routes, Tenants
from server.tenants.auth import digest

from .upstream import Exchange, upstream

TOML = f'[server]\ndefault_tenant = "acme"\nadmin_key_sha256 = "{digest("admin")}"\n[tenants.acme]\n[tenants.globex]\n'
ADMIN = {"Authorization": "Bearer admin"}
GONE = Listed("gone", 7, "http://127.0.0.1:1", "k")


class FakeCoordinator:
    def __init__(self, servers: Sequence[Listed]) -> None:
        self.listed = servers
        self.asked: list[Mapping[str, int]] = []

    async def servers(self) -> Listing:
        return Listing(tuple(self.listed), complete=True)

    async def partitions(self) -> Outcome:
        return Outcome(200, {"servers": {}})

    async def repartition(self, counts: Mapping[str, int]) -> Outcome:
        self.asked.append(counts)
        return Outcome(409, {"state": "unchanged"})


@asynccontextmanager
async def ingress(*servers: Listed, admin: bool = True, **places: tuple[int, ...]) -> AsyncIterator[Ingress]:
    found = Ingress(Tenants(TOML), Routes(places), FakeCoordinator(servers), digest("admin") if admin else None)
    await found.start()
    try:
        yield found
    finally:
        await found.stop()


async def test_a_request_and_its_answer_pass_unchanged() -> None:
    body = (bytes(range(256)) * 300, b"", b"end")
    size = {"Content-Length": str(len(b"".join(body)))}
    headers = {"X-Tenant": "acme", "Inference-Header-Content-Length": "12", "Content-Encoding": "gzip", "Connection": "x-hop"}
    async with upstream(0) as one, ingress(one.listed) as found:
        done = await Exchange(found, "POST", "/v2/models/a%2Fb/infer?x=%41&y", headers | size | {"X-Hop": "1"}, *body).run()
    ((method, path, seen, content),) = one.seen
    assert (method, path, content) == ("POST", "/v2/models/a%2Fb/infer?x=%41&y", b"".join(body))
    kept = {name.lower(): value for name, value in headers.items() if name != "Connection"}
    assert {name: value for name, value in seen.items() if name != "host"} == kept | {"content-length": size["Content-Length"]}
    assert (done.status, done.content, done.headers["x-number"]) == (200, content, "0")


async def test_a_body_of_unknown_length_is_passed_on() -> None:
    async with upstream(0) as one, ingress(one.listed) as found:
        done = await Exchange(found, "POST", "/v2", {"Transfer-Encoding": "chunked"}, b"one", b"two").run()
        assert (done.status, done.content) == (200, b"onetwo")
        assert (await Exchange(found, "GET", "/v2").run()).content == b""
        assert one.seen[-1][2].get("transfer-encoding") is None


async def test_an_answer_in_parts_is_passed_on_part_by_part() -> None:
    taken = asyncio.Event()

    async def parts(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await taken.wait()
        await answer.write(b"data: 2\n\n")
        return answer

    async with upstream(0) as one, ingress(one.listed) as found:
        one.answer = parts
        exchange = Exchange(found, "POST", "/v2/models/m/generate_stream")
        running = asyncio.create_task(exchange.run())
        assert await asyncio.wait_for(exchange.chunks.get(), 10) == b"data: 1\n\n", "before there is a second one"
        taken.set()
        await running
    assert exchange.content == b"data: 1\n\ndata: 2\n\n"
    assert exchange.headers["content-type"] == "text/event-stream"


async def test_a_request_that_reached_no_server_goes_to_the_next_one_whole() -> None:
    async with upstream(0) as one, ingress(GONE, one.listed) as found:
        for _ in range(4):  # Whichever it tries first.
            done = await Exchange(found, "POST", "/v2", {"Content-Length": "4"}, b"bo", b"dy").run()
            assert (done.status, done.content) == (200, b"body")
    async with ingress(GONE) as found:
        exchange = await Exchange(found, "POST", "/v2", {"Content-Length": "4"}, b"body").run()
    assert (exchange.status, exchange.received, exchange.headers["retry-after"]) == (503, 0, "1")


async def test_a_request_that_reached_a_server_is_sent_to_no_other() -> None:
    async def end(request: web.Request) -> web.StreamResponse:
        await request.read()
        assert request.transport
        request.transport.abort()
        return web.Response()

    async with AsyncExitStack() as stack:
        pair = [await stack.enter_async_context(upstream(number)) for number in range(2)]
        pair[0].answer = end
        found = await stack.enter_async_context(ingress(*(each.listed for each in pair)))
        done = [await Exchange(found, "POST", "/v2", {"Content-Length": "4"}, b"body").run() for _ in range(4)]
    assert sorted(each.status for each in done) == [200, 200, 502, 502]
    assert len(pair[1].seen) == 2
    broken = next(each for each in done if each.status == 502)
    assert json.loads(broken.content)["error"] == "server 0 ended before it answered; it may have run the request"


async def test_half_an_answer_does_not_look_whole() -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "10"})
        await answer.prepare(request)
        await answer.write(b"half")
        assert request.transport
        request.transport.close()
        return answer

    async with upstream(0) as one, ingress(one.listed) as found:
        one.answer = half
        with pytest.raises(aiohttp.ClientError):
            await Exchange(found, "GET", "/v2").run()


async def test_a_tenant_goes_to_its_servers_only() -> None:
    async with AsyncExitStack() as stack:
        pair = [await stack.enter_async_context(upstream(number)) for number in range(2)]
        found = await stack.enter_async_context(ingress(*(each.listed for each in pair), globex=(1,)))
        for _ in range(4):
            await Exchange(found, "GET", "/v2", {"X-Tenant": "globex"}).run()
        assert [len(each.seen) for each in pair] == [0, 4]


async def test_a_load_goes_to_every_server_until_one_refuses() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "no"}, status=404)

    async with AsyncExitStack() as stack:
        pair = [await stack.enter_async_context(upstream(number)) for number in range(2)]
        found = await stack.enter_async_context(ingress(*(each.listed for each in pair)))
        done = await load(found)
        assert (done.status, json.loads(done.content)) == (200, {"servers": ["0", "1"]})
        assert [each.seen[0][3] for each in pair] == [b"{}", b"{}"]
        pair[1].answer = refuse
        done = await load(found)
        assert (done.status, json.loads(done.content)["error"]) == (404, 'server 1: {"error": "no"} (changed before it: 0)')


async def load(found: Ingress) -> Exchange:
    return await Exchange(found, "POST", "/v2/repository/models/m/load", {"Content-Length": "2"}, b"{}").run()


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/admin/partitions", b"", 200),
        ("PUT", "/admin/partitions", b'{"acme": 2}', 409),
        ("PUT", "/admin/partitions", b"[]", 400),
        ("PUT", "/admin/partitions", b"{", 400),
        ("PUT", "/admin/partitions", b" " * ((1 << 20) + 1), 413),
        ("GET", "/admin/servers/7/metrics", b"", 503),
        ("GET", "/admin/servers/1/metrics", b"", 404),
        ("POST", "/admin/drain", b"", 404),
    ],
)
async def test_administration_of_all_servers(method: str, path: str, body: bytes, status: int) -> None:
    async with ingress(GONE) as found:
        assert (await Exchange(found, method, path, ADMIN, body).run()).status == status
        assert (await Exchange(found, method, path, {"Authorization": "Bearer other"}, body).run()).status == 401
    async with ingress(GONE, admin=False) as found:
        assert (await Exchange(found, method, path, ADMIN, body).run()).status == 401


async def test_one_server_is_asked_with_its_own_admin_key() -> None:
    async with upstream(3) as one, ingress(one.listed) as found:
        assert (await Exchange(found, "GET", "/admin/servers/3/metrics?a=b", ADMIN).run()).status == 200
        assert not any("admin" in value for value in one.seen[0][2].values())
        assert (one.seen[0][1], one.seen[0][2]["authorization"]) == ("/metrics?a=b", f"Bearer {one.listed.key}")
