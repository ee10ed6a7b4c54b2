"""A request through two applications: one that asks, and one that is asked."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request

from server import web
from server.config import Config, ModelsConfig, TenantConfig
from server.errors import Unavailable
from server.fronts import forward
from server.fronts.forward import Forwarded, answer
from server.service import Service

ACME = TenantConfig(name="acme", granules=1, models=("*",))
CONFIG = Config(models=ModelsConfig(repository=Path()), tenants={"acme": ACME}, source="test")
far = APIRouter()


@far.put("/admin/echo")
async def echo(request: Request) -> dict[str, Any]:
    body = (await request.body()).decode()
    return {"query": request.url.query, "body": body, "field": request.headers["x-field"], "client": request.client}


async def ask(asked: Forwarded) -> Any:
    return await answer(web.build((far,)), asked)


def near(asking: Any = ask, client: str = "127.0.0.1") -> httpx.AsyncClient:
    service = Service(CONFIG, [])
    application = web.build((forward.router,), service=lambda: service, ask=asking)
    return httpx.AsyncClient(transport=httpx.ASGITransport(application, client=(client, 7)), base_url="http://test")


async def test_a_request_is_forwarded_whole_and_its_answer_too() -> None:
    async with near() as http:
        told = await http.put("/admin/echo?a=b", content="text", headers={"X-Field": "value"})
    assert told.status_code == 200
    assert told.json() == {"query": "a=b", "body": "text", "field": "value", "client": ["127.0.0.1", 7]}
    assert told.headers["content-type"] == "application/json"


async def test_which_methods_are_allowed_is_for_the_other_side_to_say() -> None:
    async with near() as http:
        told = await http.delete("/admin/echo")
    assert (told.status_code, told.headers["allow"]) == (405, "PUT")


async def test_who_may_not_administer_is_refused_on_this_side() -> None:
    async def never(_: Forwarded) -> Any:
        raise AssertionError("it was asked")

    async with near(never, client="192.0.2.1") as http:
        assert (await http.put("/admin/echo")).status_code == 401
        assert (await http.get("/metrics")).status_code == 401


@pytest.mark.parametrize("path", ["load", "unload"])
async def test_models_are_loaded_for_tenants_who_are_served_here_only(path: str) -> None:
    async with near() as http:
        assert (await http.post(f"/v2/repository/models/m/{path}")).status_code == 401
        assert (await http.post(f"/v2/repository/models/m/{path}", headers={"X-Tenant": "acme"})).status_code == 421


async def test_a_side_that_is_gone_is_unavailable() -> None:
    async def gone(_: Forwarded) -> Any:
        raise Unavailable("the other process is gone")

    async with near(gone) as http:
        assert (await http.get("/metrics")).status_code == 503
