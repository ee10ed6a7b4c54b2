"""Two tenants on one server: neither sees or affects the other's models, queue and answers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.config.tenant import TenantConfig
from server.tenants.auth import digest

from .harness import Served, configuration, cores, serving
from .wire import SMALL, client, infer, request, spin, tensor

ROWS = request(tensor("x", "FP32", [1, 3], [1, 2, 3]))
KEY = {"Authorization": "Bearer open sesame"}
pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def pair(standard: Path) -> Iterator[Served]:
    acme = TenantConfig(name="acme", granules=1, models=("identity", "spin"), queue=2, in_flight=1)
    globex = TenantConfig(name="globex", granules=1, models=("rows",), keys_sha256=(digest("open sesame"),))
    with serving(configuration(standard, acme, globex)) as served:
        yield served


@pytest.fixture
def acme(pair: Served) -> Iterator[httpx.Client]:
    with client(pair) as http:
        yield http


@pytest.fixture
def globex(pair: Served) -> Iterator[httpx.Client]:
    with client(pair, **KEY) as http:
        yield http


def test_the_probe_shows_disjoint_cores(acme: httpx.Client) -> None:
    answer = acme.post("/admin/partitions/probe").json()
    located = [set(partition["located"]) for partition in answer["partitions"].values()]
    assert all(located)
    assert not set.intersection(*located)
    assert answer["overlaps"] == []


MODEL_PATHS = [
    ("GET", "/v2/models/{}"),
    ("GET", "/v2/models/{}/versions/1"),
    ("GET", "/v2/models/{}/ready"),
    ("GET", "/v2/models/{}/config"),
    ("GET", "/v2/models/{}/stats"),
    ("GET", "/v2/models/{}/versions/1/stats"),
    ("POST", "/v2/models/{}/infer"),
    ("POST", "/v2/models/{}/versions/1/infer"),
    ("POST", "/v2/repository/models/{}/load"),
    ("POST", "/v2/repository/models/{}/unload"),
]


@pytest.mark.parametrize(("method", "path"), MODEL_PATHS)
def test_a_model_of_another_tenant_is_answered_as_one_that_does_not_exist(acme: httpx.Client, method: str, path: str) -> None:
    body = json.dumps(SMALL) if "infer" in path else ""
    existing = acme.request(method, path.format("rows"), content=body)
    missing = acme.request(method, path.format("none"), content=body)
    assert existing.status_code == missing.status_code == 404
    assert existing.text == missing.text.replace("none", "rows")


@pytest.mark.parametrize("path", ["/v2/models/{}", "/v2/models/{}/infer"])
def test_an_unknown_model_is_refused_with_similar_names_of_the_tenants_own_models_only(
    acme: httpx.Client, globex: httpx.Client, path: str
) -> None:
    def said(client: httpx.Client, name: str) -> str:
        answer = client.request("POST" if "infer" in path else "GET", path.format(name), content=json.dumps(SMALL))
        assert answer.status_code == 404
        return answer.json()["error"]

    assert said(globex, "row") == "Request for unknown model: 'row' is not found; did you mean 'rows'?"
    assert said(acme, "row") == "Request for unknown model: 'row' is not found"


def test_index_and_statistics_list_only_the_tenants_own_models(acme: httpx.Client, globex: httpx.Client) -> None:
    assert {entry["name"] for entry in acme.post("/v2/repository/index").json()} == {"identity", "spin"}
    assert {entry["name"] for entry in globex.post("/v2/repository/index").json()} == {"rows"}
    assert {entry["name"] for entry in globex.get("/v2/models/stats").json()["model_stats"]} == {"rows"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic open sesame"},
        {"Authorization": "Bearer"},
        {"X-Tenant": "globex"},
        {"X-Tenant": "nobody"},
        {"X-Tenant": "acme", "Authorization": "Bearer open sesame"},
    ],
)
def test_a_request_without_a_valid_tenant_is_401_everywhere(acme: httpx.Client, headers: dict[str, str]) -> None:
    for path in ("/v2/models/stats", "/v2/models/identity"):
        assert acme.get(path, headers=headers).status_code == 401
    answer = infer(acme, "identity", SMALL, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]


def test_a_full_queue_is_429_and_does_not_affect_the_other_tenant(pair: Served) -> None:
    async def flood() -> tuple[list[httpx.Response], list[httpx.Response]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=pair.url, timeout=60, limits=limits) as client:
            mine = [client.post("/v2/models/spin/infer", json=spin(3000)) for _ in range(12)]
            theirs = [client.post("/v2/models/rows/infer", json=ROWS, headers=KEY) for _ in range(12)]
            answers = await asyncio.gather(*mine, *theirs)
            return list(answers[:12]), list(answers[12:])

    mine, theirs = asyncio.run(flood())
    refused = [answer for answer in mine if answer.status_code == 429]
    assert refused
    assert sum(answer.status_code == 200 for answer in mine) == 12 - len(refused) >= 3
    for answer in refused:
        assert answer.headers["retry-after"]
        assert answer.json()["error"].startswith("Exceeds maximum queue size")
    assert [answer.status_code for answer in theirs] == [200] * 12
    assert all(answer.json()["outputs"][0]["data"] == [-1, -2, -3] for answer in theirs)


def test_unloading_for_one_tenant_leaves_the_model_with_the_other(standard: Path) -> None:
    tenants = [TenantConfig(name=name, granules=1, models=("identity",)) for name in ("one", "two")]
    with serving(configuration(standard, *tenants)) as served, client(served) as http:
        assert http.post("/v2/repository/models/identity/unload", headers={"X-Tenant": "one"}).status_code == 200
        gone, there = (infer(http, "identity", SMALL, headers={"X-Tenant": name}) for name in ("one", "two"))
    assert (gone.status_code, there.status_code) == (503, 200)
