"""Whose lines of the audit are left out, when one caller makes too many."""

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.admin import models, partitions
from server.api import framework
from server.api.framework import audited
from server.config.schema import Config, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from server.errors import NotFound, Unauthorized
from server.host import logs
from server.host.log_writer import AT_ONCE
from server.tenants import audit
from server.tenants.auth import digest
from server.tenants.service import Service

KEYS = {"acme": "acme-key", "globex": "globex-key"}
FLOOD = AT_ONCE + 50
NOPE = "/v2/repository/models/nope/unload"


class Control:
    """A controller that has every model but `nope`."""

    async def unload(self, tenant: str, name: str) -> None:
        if name == "nope":
            raise NotFound(name)

    @property
    def tenants(self) -> dict[str, TenantConfig]:
        return tenants()


def tenants() -> dict[str, TenantConfig]:
    return {name: TenantConfig(name=name, granules=1, models=("*",), keys_sha256=(digest(key),)) for name, key in KEYS.items()}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """The audit's file."""
    names = ("greenlane", "uvicorn", "greenlane.audit")
    before = [(each, each.handlers, each.level, each.propagate) for each in map(logging.getLogger, names)]
    logs.configure("json", "error", tmp_path / "audit.jsonl")
    yield tmp_path / "audit.jsonl"
    logs.configure("json", "error")
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
async def http(file: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Asks an application as the supervisor's is."""
    service = Service(
        Config(
            models=ModelsConfig(repository=Path()),
            server=ServerConfig(admin_key_sha256=digest("admin")),
            tenants=tenants(),
            source="test",
        ),
        (),
    )
    web: Any = framework.build(
        (models.forwarded, models.router, partitions.router), service=lambda: service, controller=Control
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(audited(web)), base_url="http://localhost") as client:
        yield client


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def ask(http: httpx.AsyncClient, path: str, key: str | None) -> int:
    return (await http.post(path, headers={"Authorization": f"Bearer {key}"} if key else {})).status_code


async def test_a_tenant_that_calls_in_a_loop_leaves_out_no_line_of_others(http: httpx.AsyncClient, file: Path) -> None:
    assert {await ask(http, NOPE, KEYS["acme"]) for _ in range(FLOOD)} == {404}
    done = [
        ("/admin/tenants/globex/models/m/unload", "admin", 200),
        ("/v2/repository/models/m/unload", KEYS["globex"], 200),
        (NOPE, KEYS["globex"], 404),
        ("/v2/repository/models/m/unload", KEYS["acme"], 200),
    ]
    for path, key, status in done:
        assert await ask(http, path, key) == status
    *flood, admin, globex, refused, own = [(each["path"], each.get("tenant"), each["status"]) for each in lines(file)]
    assert set(flood) == {(NOPE, "acme", 404)}
    assert AT_ONCE <= len(flood) < FLOOD, "one more for each second that this takes"
    assert admin == (done[0][0], None, 200)
    assert globex == (done[1][0], "globex", 200)
    assert refused == (NOPE, "globex", 404)
    assert own == (done[3][0], "acme", 200), "what changes something has an allowance of its own"


async def test_no_call_of_the_administrator_is_left_out(http: httpx.AsyncClient, file: Path) -> None:
    for path in ("/admin/tenants/globex/models/m/unload", "/admin/tenants/none/models/m/unload"):
        for _ in range(FLOOD):
            await ask(http, path, "admin")
    found = Counter(each["status"] for each in lines(file))
    assert found == {200: FLOOD, 404: FLOOD}


async def test_who_has_no_admin_key_is_no_administrator(http: httpx.AsyncClient, file: Path) -> None:
    for _ in range(FLOOD):
        assert await ask(http, "/admin/nothing", None) == 404
    assert AT_ONCE <= len(lines(file)) < FLOOD, "one more for each second that this takes"


@pytest.mark.parametrize("client", [["10.0.0.1", 1], ("::ffff:10.0.0.1", 1), ("2001:db8::1", 1)], ids=str)
def test_a_client_without_a_key_leaves_out_few_lines_of_others(file: Path, client: Any) -> None:
    for number in range(FLOOD):
        key = f"Bearer guess-{number}"
        audit.refused(Unauthorized("no tenant has this key"), "GET", "/v2", client, key)
    flood = len(lines(file))
    assert flood == AT_ONCE, "guesses of one address are one kind"
    others = [(f"10.0.{number}.7", 1) for number in range(200)]
    for other in others:
        audit.refused(Unauthorized("no tenant has this key"), "GET", "/v2", other, None)
    assert len(lines(file)) > flood + 150


def test_addresses_of_one_network_of_ipv6_are_one_client(file: Path) -> None:
    for number in range(FLOOD):
        audit.refused(Unauthorized("no"), "GET", "/v2", (f"2001:db8:1:2::{number:x}%eth0", 1), None)
    assert len(lines(file)) == AT_ONCE


def test_a_line_says_whose_lines_were_left_out_before_it(file: Path) -> None:
    def record() -> logging.LogRecord:
        return logging.LogRecord("greenlane.audit", logging.INFO, "", 0, "call", (), None)

    now = [0.0]
    limit = logs.RateLimit(lambda: now[0])
    for _ in range(FLOOD):
        each = record()
        each.caller = "tenant acme, refused"
        limit.filter(each)
    now[0] = 1.0
    last = record()
    last.caller = "tenant acme, refused"
    assert limit.filter(last)
    shown = json.loads(logs.JsonFormatter().format(last))
    assert (shown["left_out"], shown["left_out_of"]) == (FLOOD - AT_ONCE, "tenant acme, refused")
