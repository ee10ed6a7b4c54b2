"""The audit, in both forms: who called what, who was refused, and what was reloaded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.tenants.auth import digest

from .fixtures import Site
from .processes import Running, running, running_plain, tenant
from .wire import SMALL, client, infer, until

KEYED = {"Authorization": "Bearer secret"}
ADMIN = {"Authorization": "Bearer admin"}
SETTINGS = {"audit": '"audit.jsonl"', "admin_key_sha256": f'"{digest("admin")}"'}


class Audited(Site):
    def write(self, **more: object) -> Path:
        return super().write(tenant("acme", "identity", keys_sha256=[digest("secret")], **more), **SETTINGS)

    def lines(self, message: str) -> list[dict[str, Any]]:
        """The audit's lines of this kind."""
        file = self.folder / "audit.jsonl"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line for line in found if line["message"] == message]


@pytest.fixture(scope="module", params=[running, running_plain], ids=["processes", "uvicorn"])
def start(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def site(standard: Path, tmp_path_factory: pytest.TempPathFactory, start: Any) -> Audited:
    return Audited(tmp_path_factory.mktemp("audit"), standard)


@pytest.fixture(scope="module")
def server(site: Audited, start: Any) -> Iterator[Running]:
    with start(site.write()) as server, client(server, **KEYED) as http:
        until(lambda: infer(http, "identity", SMALL).status_code == 200)
        yield server


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with client(server) as http:
        yield http


def test_changes_are_written_with_who_asked_and_the_outcome(site: Audited, http: httpx.Client) -> None:
    assert http.get("/admin/tenants", headers=ADMIN).status_code == 200
    assert http.put("/admin/partitions", json={"acme": 4096}, headers=ADMIN).status_code == 409
    assert http.post("/v2/repository/models/identity/load", headers=KEYED).status_code == 200
    found = [[each[key] for key in ("method", "path", "client", "key", "status")] for each in site.lines("call")]
    admin, own = (f"{digest(key)[:8]}..." for key in ("admin", "secret"))
    assert found == [
        ["PUT", "/admin/partitions", "127.0.0.1", admin, 409],
        ["POST", "/v2/repository/models/identity/load", "127.0.0.1", own, 200],
    ]


def test_refusals_of_keys_are_written_and_no_key_is(site: Audited, http: httpx.Client) -> None:
    wrong = {"Authorization": "Bearer wrong"}
    assert infer(http, "identity", SMALL, headers=wrong).status_code == 401
    assert http.post("/admin/drain", headers=wrong).status_code == 401
    assert http.get("/v2/models/identity", headers={"X-Tenant": "acme"}).status_code == 401
    found = [(each["method"], each["path"], each.get("key")) for each in site.lines("unauthorized")]
    tried = f"{digest('wrong')[:8]}..."
    assert found == [
        ("POST", "/v2/models/identity/infer", tried),
        ("POST", "/admin/drain", tried),
        ("GET", "/v2/models/identity", None),
    ]
    assert "wrong" not in (site.folder / "audit.jsonl").read_text()


def test_uvicorn_has_a_proxy_on_this_host_name_the_client_of_an_inference_and_the_other_form_does_not(
    site: Audited, http: httpx.Client, start: Any
) -> None:
    refused = {"Authorization": "Bearer another"}
    for more in ({}, {"X-Forwarded-For": "10.1.2.3"}, {}):
        assert infer(http, "identity", SMALL, headers=refused | more).status_code == 401
    tried = f"{digest('another')[:8]}..."
    found = [each["client"] for each in site.lines("unauthorized") if each.get("key") == tried]
    named = "10.1.2.3" if start is running_plain else "127.0.0.1"
    assert found == ["127.0.0.1", named, "127.0.0.1"]


def test_reloads_are_written_with_what_changed(site: Audited, http: httpx.Client) -> None:
    site.write(requests_per_second=5)
    assert http.post("/admin/reload", headers=ADMIN).status_code == 200
    site.write(requests_per_second=5, queue=3)
    assert http.post("/admin/reload", headers=ADMIN).status_code == 409
    assert [each["changed"] for each in site.lines("reloaded")] == [["tenants.acme.requests_per_second: (not set) -> 5"]]
    assert "tenants.acme.queue: 64 -> 3 needs a restart" in site.lines("reload refused")[0]["reason"]
