"""Requests without a version are shared out among versions by weights, which a reload changes while they are answered."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from . import repository
from .processes import Running, configure, running, running_plain, tenant
from .test_metrics import scrape, value
from .wire import client, infer, request, tensor, until

FORMS = {"uvicorn": running_plain, "processes": running}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for version in (1, 2):
        text = repository.SCALED.replace("FACTOR", str(version))
        repository.write(tmp_path / "models", "scaled", text, version, config="version_policy { all {} }")
    return write(tmp_path / "greenlane.toml", 0.9, 0.1)


def write(path: Path, first: float, second: float, more: str = "") -> Path:
    weights = f"[models.scaled]\nweights = {{ 1 = {first}, 2 = {second} }}\n"
    return configure(path, path.parent / "models", weights + tenant() + more)


@pytest.fixture(params=FORMS)
def http(file: Path, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    server: Running
    with FORMS[request.param](file) as server, client(server, "acme") as http:
        until(lambda: http.get("/v2/health/ready").status_code == 200)
        yield http


def versions(http: httpx.Client, count: int) -> Counter[str]:
    """How many of so many requests each version answers, which has its number as its factor."""
    found: Counter[str] = Counter()
    for _ in range(count):
        answer = infer(http, "scaled", request(tensor("x", "FP32", [1], [1]))).json()
        assert answer["outputs"][0]["data"] == [float(answer["model_version"])]
        found[answer["model_version"]] += 1
    return found


def test_weights_are_kept_exactly_and_changed_by_a_reload(file: Path, http: httpx.Client) -> None:
    assert versions(http, 20) == {"1": 18, "2": 2}
    assert http.get("/v2/models/scaled").json()["versions"] == ["1", "2"]
    scraped = scrape(http)
    for version, count, share in (("1", 18, 0.9), ("2", 2, 0.1)):
        labels = {"model": "scaled", "version": version, "tenant": "acme"}
        assert value(scraped, "nv_inference_request_success", **labels) == count
        assert value(scraped, "greenlane_version_share_ratio", **labels) == share
    write(file, 0, 1)
    answer = http.post("/admin/reload")
    assert answer.json() == {
        "changed": [
            {"key": "models.scaled.weights", "old": "{ 1 = 0.9, 2 = 0.1 }", "new": "{ 1 = 0.0, 2 = 1.0 }"},
        ]
    }
    assert versions(http, 5) == {"2": 5}
    write(file, 0, 1, "weights = { scaled = { 1 = 1, 2 = 3 } }")
    assert http.post("/admin/reload").status_code == 200
    assert versions(http, 8) == {"1": 2, "2": 6}
