"""Readiness with models that could not be loaded, in every form of the server."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.models import ENDLESS

from . import repository
from .fixtures import WAYS, served_as
from .harness import configuration, cores, serving
from .processes import configure, running, tenant
from .wire import SMALL, client, infer, until

WHY = "not every model could be loaded, and server.strict_readiness asks for all of them; "
WHY += "POST /v2/repository/index says which of a tenant's, the log which of all"


@pytest.fixture(params=WAYS[:3])
def http(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A strict server with a model that is whole and one that is not."""
    root = tmp_path / "models"
    repository.write(root, "identity", repository.IDENTITY)
    repository.write(root, "broken", repository.IDENTITY, config="max_batch_size: many")
    with served_as(request.param, root, tmp_path, strict_readiness=True) as server, client(server) as http:
        yield http


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


def test_a_model_whose_warm_up_does_not_end_keeps_no_server_from_ready(tmp_path: Path) -> None:
    """It kept its tenant's models from being loaded, and all tenants out of a load balancer, without a line in the log."""
    root = tmp_path / "models"
    for name, text in (("endless", ENDLESS), ("identity", repository.IDENTITY)):
        repository.write(root, name, text)
    with running(configure(tmp_path / "c.toml", root, tenant("acme"), max_execution='"1s"')) as server, client(server) as http:
        server.wait_for_log("ready: acme is served endless 1 and identity 1")
        server.wait_for_log("it had not ended after 1 s, and was stopped")
        assert http.get("/v2/health/ready").status_code == 200
        assert infer(http, "identity", SMALL).status_code == 200
        answer = infer(http, "endless", {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]})
        assert answer.status_code == 504


def test_a_tenant_without_any_model_is_not_ready_for_itself_and_takes_no_other_out_of_service(tmp_path: Path) -> None:
    if len(cores()) < 2:
        pytest.skip("two tenants need two cores")
    root = tmp_path / "models"
    repository.write(root, "identity", repository.IDENTITY)
    repository.write(root, "broken", repository.IDENTITY, config="max_batch_size: many")
    tenants = tenant("acme", "identity") + tenant("globex", "broken")
    with running(configure(tmp_path / "c.toml", root, tenants)) as server:
        server.wait_for_log("ready: acme is served identity 1; globex is served nothing")
        server.wait_for_log("served no model, and not ready for itself: tenant globex")
        with client(server, "globex") as globex, client(server) as anyone:
            refused = globex.get("/v2/health/ready")
            assert refused.json() == {"error": "'globex' is served no model; POST /v2/repository/index says why"}
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert globex.get("/v2/health/live").status_code == 200
            assert anyone.get("/v2/health/ready").status_code == 200
            assert 'greenlane_tenant_ready{tenant="globex"} 0.0' in anyone.get("/metrics").text
            status = anyone.get("/admin/status").json()
            assert (status["ready"], {each["name"]: each["ready"] for each in status["tenants"]}) == (
                True,
                {"acme": True, "globex": False},
            )
            assert globex.post("/v2/repository/models/broken/unload").status_code == 200
            assert globex.get("/v2/health/ready").status_code == 200, "that is how it was asked for"
            (root / "broken" / "config.pbtxt").unlink()
            assert globex.post("/v2/repository/models/broken/load").status_code == 200
            assert globex.get("/v2/health/ready").status_code == 200
            assert 'greenlane_tenant_ready{tenant="globex"} 1.0' in anyone.get("/metrics").text


def test_a_server_without_any_model_is_not_ready(tmp_path: Path) -> None:
    repository.write(tmp_path, "broken", repository.IDENTITY, config="max_batch_size: many")
    with serving(configuration(tmp_path)) as server, client(server) as http:
        refused = http.get("/v2/health/ready")
        assert (refused.status_code, "no tenant is served a model" in refused.text) == (503, True)
        assert http.get("/admin/status").json()["state"] == "incomplete"
        assert "greenlane_ready 0.0" in http.get("/metrics").text
