"""Readiness with models that could not be loaded, in every form of the server."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from . import repository
from .harness import PATIENCE, configuration, serving
from .processes import configure, running
from .wire import SMALL, infer, until

WHY = "not every model could be loaded, and server.strict_readiness asks for all of them; "
WHY += "POST /v2/repository/index says which of a tenant's, the log which of all"


@pytest.fixture(params=["asgi", "direct", "fronts"])
def http(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A strict server with a model that is whole and one that is not."""
    root = tmp_path / "models"
    repository.write(root, "identity", repository.IDENTITY)
    repository.write(root, "broken", repository.IDENTITY, config="max_batch_size: many")
    if request.param == "fronts":
        tenants = '[tenants.acme]\ngranules = 1\nmodels = ["*"]'
        config = configure(tmp_path / "c.toml", root, tenants, default_tenant='"acme"', strict_readiness="true")
        with running(config) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            yield client
    else:
        config = configuration(root, strict_readiness=True)
        with serving(config, direct=request.param == "direct") as server, httpx.Client(base_url=server.url) as client:
            yield client


def test_a_strict_server_is_ready_once_the_broken_model_is_repaired_or_unloaded(tmp_path: Path, http: httpx.Client) -> None:
    until(lambda: http.post("/v2/repository/index").json()[-1].get("state") == "READY")  # The last that is loaded.
    assert infer(http, "identity", SMALL).status_code == 200, "it serves what it can"
    answer = http.get("/v2/health/ready")
    assert (answer.status_code, answer.json()) == (503, {"error": WHY})
    assert "greenlane_ready 0.0" in http.get("/metrics").text
    assert http.get("/v2/health/live").status_code == 200
    (tmp_path / "models" / "broken" / "config.pbtxt").unlink()
    assert http.post("/v2/repository/models/broken/load").status_code == 200
    until(lambda: http.get("/v2/health/ready").status_code == 200)
    (tmp_path / "models" / "new" / "1").mkdir(parents=True)
    assert http.post("/v2/repository/models/new/load").status_code == 400
    until(lambda: http.get("/v2/health/ready").status_code == 503)
    assert http.post("/v2/repository/models/new/unload").status_code == 200
    until(lambda: http.get("/v2/health/ready").status_code == 200)
