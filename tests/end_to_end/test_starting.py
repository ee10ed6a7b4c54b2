"""Requests between the start of the listening and the loading of the models, in every form of the server."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from greenlane.load.server_process import free_port
from server.config.tenant import TenantConfig
from server.device.model_loader import ModelLoader
from tests.fakes import FakeDevice

from . import repository
from .gated_server import gated, late
from .harness import PATIENCE, configuration, starting
from .processes import configure, running_module, tenant
from .wire import SMALL, infer, until

FORMS = ("uvicorn", "cores", "device", "several")
LOADING = "model 'identity': the server is starting, and does not know yet which models there are; try again soon"
OPENAI = {"model": "identity", "input": "a"}


class Starting:
    """A server that listens; `go` has it look for its models, or load the one that is late."""

    def __init__(self, url: str, root: Path, grpc: int = 0, wait_for_log: Callable[[str], object] = lambda _: None) -> None:
        self.http = httpx.Client(base_url=url, timeout=PATIENCE, headers={"X-Tenant": "acme"})
        self.grpc = grpc
        self.wait_for_log = wait_for_log
        self._root = root

    def go(self, name: str = "gate") -> None:
        gate = self._root / name
        with gate.open("wb"):  # Once the device side waits there.
            gate.unlink()


@pytest.fixture(params=FORMS)
def server(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starting]:
    root = tmp_path / "models"
    for name in ("identity", "late"):
        repository.write(root, name, repository.IDENTITY)
    for name in ("gate", "late"):
        os.mkfifo(tmp_path / name)
    if request.param == "uvicorn":
        monkeypatch.setattr(ModelLoader, "names", gated)
        monkeypatch.setattr(ModelLoader, "prepare", late)
        with starting(configuration(root)) as served:
            found = Starting(served.url, tmp_path)
            yield found
            found.http.close()
        return
    port = free_port()
    tenants = tenant(grpc_port=port, http_processes=2 if request.param == "several" else 1)
    path = configure(tmp_path / "c.toml", root, tenants, default_tenant='"acme"')
    options = () if request.param == "cores" else ("--device",)
    with running_module("tests.end_to_end.gated_server", path, *options, signs=("listening on http://",)) as running:
        found = Starting(running.url, tmp_path, port, running.wait_for_log)
        yield found
        found.http.close()


def test_what_may_be_a_model_is_503_until_it_is_known_and_404_only_then(server: Starting) -> None:
    http = server.http
    try:
        for answer in (infer(http, "identity", SMALL), http.get("/v2/models/identity"), http.get("/v2/models/identity/ready")):
            assert (answer.status_code, answer.json()) == (503, {"error": LOADING})
            assert answer.headers["retry-after"] == "1"
        answer = http.post("/v1/embeddings", json=OPENAI)
        assert (answer.status_code, answer.json()["error"]["message"], answer.headers["retry-after"]) == (503, LOADING, "1")
        assert infer(http, "gone", SMALL).status_code == 503
        index = [{"name": name, "state": "LOADING"} for name in ("identity", "late")]
        assert http.post("/v2/repository/index").json() == index
        assert http.get("/v2/health/ready").json() == {"error": "the server is starting"}
        if server.grpc:
            with (
                triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as grpc,
                pytest.raises(InferenceServerException) as refused,
            ):
                grpc.get_model_metadata("identity", headers={"x-tenant": "acme"})
            assert (refused.value.status(), refused.value.message()) == ("StatusCode.UNAVAILABLE", LOADING)
    finally:
        server.go()
    try:
        until(lambda: http.get("/v2/models/identity/ready").status_code == 200)
        progress = "the server is starting: 1 of 2 models is ready; reading or building {}"
        until(lambda: progress.format(1) in http.get("/v2/health/ready").text)
        assert http.get("/v2/health/ready").json() == {"error": progress.format(1)}, "without names: it needs no key"
        status = http.get("/admin/status").json()
        assert f"the server is {status['state']}: {status['progress']}" == progress.format("late (acme)")
        server.wait_for_log(" s; 1 of 2 models is ready")
    finally:
        server.go("late")
    until(lambda: http.get("/v2/health/ready").status_code == 200)
    assert http.get("/admin/status").json()["progress"] == ""
    assert infer(http, "identity", SMALL).status_code == 200
    answer = infer(http, "gone", SMALL)
    assert (answer.status_code, answer.json()) == (404, {"error": "Request for unknown model: 'gone' is not found"})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # uvicorn exits, as from a process.
def test_a_start_in_one_process_that_fails_closes_the_device(tmp_path: Path) -> None:
    device, acme = FakeDevice((1, 1)), TenantConfig(name="acme", granules=3, models=("*",))
    with pytest.raises(AssertionError, match="the server did not start"), starting(configuration(tmp_path, acme), device):
        pass
    assert device.closed
