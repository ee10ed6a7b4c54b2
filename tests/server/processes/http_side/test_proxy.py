"""A request through two applications: one that asks, and one that is asked."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request

from server.api import framework, model_control
from server.api.body import MAX_BODY
from server.config.schema import Config, ModelOptions, ModelsConfig
from server.config.tenant import TenantConfig
from server.errors import Unavailable
from server.http.compression import encoding_of
from server.http.exchange import Reply
from server.processes.http_side import proxy
from server.processes.http_side.proxy import ForwardedRequest, answer
from server.tenants.service import TENANTLESS_MEMORY, Service, Tenant, open_tenant
from tests.memory import linked

ACME = TenantConfig(name="acme", granules=1, models=("*",))
CONFIG = Config(
    models=ModelsConfig(repository=Path(), options={"m": ModelOptions(max_batch=4)}), tenants={"acme": ACME}, source="test"
)
far = APIRouter()


@far.put("/admin/echo")
async def echo(request: Request) -> dict[str, Any]:
    body = (await request.body()).decode()
    return {"query": request.url.query, "body": body, "field": request.headers["x-field"], "client": request.client}


async def ask(asked: ForwardedRequest) -> Any:
    return await answer(framework.build((far,)), asked)


def near(asking: Any = ask, client: str = "127.0.0.1", *tenants: Tenant) -> httpx.AsyncClient:
    service = Service(CONFIG, tenants)
    control = proxy.RemoteModelControl(asking)
    routers = (model_control.router, proxy.router)
    state = {"forward": asking, "open_turn": asyncio.Lock(), "model_control": control}
    application = framework.build(routers, service=lambda: service, **state)
    return httpx.AsyncClient(transport=httpx.ASGITransport(application, client=(client, 7)), base_url="http://localhost")


async def test_a_request_is_forwarded_whole_and_its_answer_too() -> None:
    async with near() as http:
        told = await http.put("/admin/echo?a=b", content="text", headers={"X-Field": "value"})
    assert told.status_code == 200
    assert told.json() == {"query": "a=b", "body": "text", "field": "value", "client": ["127.0.0.1", 7]}
    assert told.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("method", "path"), [("PUT", "/admin/echo"), ("GET", "/v2/logging")])
async def test_a_packed_request_is_unpacked_once(method: str, path: str) -> None:
    asked = list[ForwardedRequest]()

    async def remember(request: ForwardedRequest) -> Any:
        asked.append(request)
        return await ask(request)

    async with near(remember) as http:
        fields = {"X-Field": "value", "Content-Encoding": "gzip"}
        await http.request(method, path, content=gzip.compress(b"text"), headers=fields)
    (only,) = asked
    assert only.body == (b"text" if method == "PUT" else b"")
    assert encoding_of(only.headers[b"content-encoding"]) == ""


async def test_what_anybody_may_ask_leaves_room_for_administrators() -> None:
    """The supervisor answers so many calls of a process at once, with so many bytes in all."""
    asked, answering = list[ForwardedRequest](), asyncio.Event()

    async def slow(request: ForwardedRequest) -> Any:
        asked.append(request)
        if request.raw_path == b"/v2/logging":
            await answering.wait()
        return await ask(request)

    async with near(slow) as http:
        flood = [asyncio.ensure_future(http.request("GET", "/v2/logging", content=b"x" * 1000)) for _ in range(200)]
        while not asked:
            await asyncio.sleep(0)
        assert (await http.put("/admin/echo", headers={"X-Field": "value"})).status_code == 200
        assert [each.raw_path for each in asked] == [b"/v2/logging", b"/admin/echo"]
        answering.set()
        await asyncio.gather(*flood)
    assert len(asked) == 201
    assert asked[0].body == b""


async def test_bodies_of_anybody_that_do_not_end_leave_administrators_room_for_theirs() -> None:
    begun, end = list[int](), asyncio.Event()

    async def endless(number: int) -> AsyncIterator[bytes]:
        begun.append(number)
        yield b"x"
        await end.wait()

    async def look(http: httpx.AsyncClient, number: int) -> httpx.Response:
        announced = {"Content-Length": str(MAX_BODY)}
        return await http.request("GET", "/v2/logging", content=endless(number), headers=announced)

    async with near() as http:
        looks = [asyncio.ensure_future(look(http, number)) for number in range(TENANTLESS_MEMORY // MAX_BODY)]
        while len(begun) + sum(each.done() for each in looks) < len(looks):
            await asyncio.sleep(0)
        assert (await http.put("/admin/echo", content=b"{}", headers={"X-Field": "value"})).status_code == 200
        end.set()
        await asyncio.gather(*looks)


async def test_the_device_process_decides_which_methods_are_allowed() -> None:
    async with near() as http:
        told = await http.delete("/admin/echo")
    assert (told.status_code, told.headers["allow"]) == (405, "PUT")


async def test_unauthorized_administration_is_not_forwarded() -> None:
    async def never(_: ForwardedRequest) -> Any:
        raise AssertionError("it was asked")

    async with near(never, client="192.0.2.1") as http:
        assert (await http.put("/admin/echo")).status_code == 401
        assert (await http.get("/metrics")).status_code == 401


@pytest.mark.parametrize("path", ["load", "unload"])
async def test_models_are_loaded_only_for_tenants_served_here(path: str) -> None:
    async with near() as http:
        assert (await http.post(f"/v2/repository/models/m/{path}")).status_code == 401
        assert (await http.post(f"/v2/repository/models/m/{path}", headers={"X-Tenant": "acme"})).status_code == 421


async def test_a_device_process_that_is_gone_is_503() -> None:
    async def gone(_: ForwardedRequest) -> Any:
        raise Unavailable("the other process is gone")

    async with near(gone) as http:
        assert (await http.get("/metrics")).status_code == 503


class Far:
    """Answers what is forwarded once it is let, and remembers it."""

    def __init__(self) -> None:
        self.asked: list[ForwardedRequest] = []
        self.cancelled = 0
        self.gate = asyncio.Event()

    async def __call__(self, asked: ForwardedRequest) -> Reply:
        self.asked.append(asked)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Reply(200, [], b"")


class Nobody:
    def cancel(self, slot: int, serial: int) -> None:
        raise AssertionError


@pytest.fixture
def acme() -> Iterator[Tenant]:
    with linked() as link:
        yield open_tenant(ACME, link, Nobody())


AS_ACME = {"X-Tenant": "acme"}
LOAD, UNLOAD = "/v2/repository/models/m/load", "/v2/repository/models/m/unload"


def loading(config: Any) -> dict[str, Any]:
    return {"parameters": {"config": config if isinstance(config, str) else json.dumps(config)}}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"[]", "the request body is an array; expected an object"),
        (json.dumps(loading("[" * 300_000)).encode(), "failed to load 'm': the config parameter: 300000 bytes"),
        (
            json.dumps(loading({"version_policy": {"specific": {"versions": list(range(1, 5000))}}})).encode(),
            "more than 1024 val",
        ),
        (json.dumps(loading({f"k{number}": 1 for number in range(1000)})).encode(), "the config parameter: k0 (there is no"),
        (json.dumps(loading({"max_batch_size": 9})).encode(), "models.m.max_batch in the server's configuration overrules it"),
        (json.dumps({"parameters": {"file:1/model.onnx": "x" * 500_000}}).encode(), "put files into the repository"),
    ],
)
async def test_a_wrong_load_request_is_not_forwarded(acme: Tenant, body: bytes, text: str) -> None:
    far = Far()
    far.gate.set()  # Were it asked, it would answer.
    async with near(far, "127.0.0.1", acme) as http:
        told = await http.post(LOAD, content=body, headers=AS_ACME)
    assert told.status_code == 400
    assert text in told.json()["error"]
    assert (len(told.content) < 500, far.asked) == (True, [])


async def test_only_the_checked_part_of_a_load_request_is_forwarded(acme: Tenant) -> None:
    far = Far()
    far.gate.set()
    config = {"max_batch_size": 4}
    body = {"padding": "x" * 500_000, **loading(config)}
    async with near(far, "127.0.0.1", acme) as http:
        for path, content in ((LOAD, body), (LOAD, {}), (UNLOAD, {"padding": "x" * 500_000})):
            assert (await http.post(path, json=content, headers=AS_ACME)).status_code == 200
    assert [json.loads(asked.body or "null") for asked in far.asked] == [loading(config), None, None]
    assert [int(asked.headers[b"content-length"]) for asked in far.asked] == [len(asked.body) for asked in far.asked]


async def test_a_tenants_changes_come_one_at_a_time_and_more_than_may_wait_are_429(acme: Tenant) -> None:
    far = Far()
    async with near(far, "127.0.0.1", acme) as http:
        posts = [asyncio.ensure_future(http.post(path, headers=AS_ACME)) for path in (LOAD, UNLOAD, LOAD, LOAD, UNLOAD)]
        while repr(acme.changes) != "<ModelChanges 5 asked for>" or not far.asked:
            await asyncio.sleep(0)
        for path in (LOAD, UNLOAD):
            refused = await asyncio.wait_for(http.post(path, headers=AS_ACME), 10)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"].startswith("4 loads and unloads wait already")
        assert len(far.asked) == 1
        far.gate.set()
        assert [told.status_code for told in await asyncio.gather(*posts)] == [200] * 5
    assert len(far.asked) == 5
    assert repr(acme.changes) == "<ModelChanges 0 asked for>"


async def test_a_disconnect_cancels_the_change_and_the_next_one_runs(acme: Tenant) -> None:
    far = Far()
    async with near(far, "127.0.0.1", acme) as http:
        posts = [asyncio.ensure_future(http.post(LOAD, headers=AS_ACME))]
        while not far.asked:  # The framework calls dependencies on threads, so requests sent together come in any order.
            await asyncio.sleep(0)
        posts += [asyncio.ensure_future(http.post(LOAD, headers=AS_ACME)) for _ in range(2)]
        while repr(acme.changes) != "<ModelChanges 3 asked for>":
            await asyncio.sleep(0)
        for post in posts[:2]:
            post.cancel()
        await asyncio.wait(posts[:2])
        far.gate.set()
        assert (await posts[2]).status_code == 200
    assert (len(far.asked), far.cancelled) == (2, 1), "one that waited was never asked for"
