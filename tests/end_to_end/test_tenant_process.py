"""On cores of the host a tenant's process has its models too: what ends it ends nothing else."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from . import repository
from .fixtures import server_with
from .harness import cores
from .processes import PAIR, Load, Running, configure, running, running_device, running_module, tenant, threads
from .test_device_process import others
from .wire import SMALL, answered, client, infer, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")


IDENTITY = tenant() + tenant("globex", "identity")
OVERRIDE = {"parameters": {"config": json.dumps({"max_batch_size": 3})}}


server = server_with(PAIR)


def test_each_tenants_models_are_in_its_own_process_on_its_own_cores(server: Running, acme: httpx.Client) -> None:
    names = {one.name for one in server.family()}
    assert not any("greenlane dev" in name for name in names), "there is no device process"
    for name, pid in (("acme", server.pid("acme")), ("globex", server.pid("globex"))):
        assert "onnxruntime" in Path(f"/proc/{pid}/maps").read_text(), name
        granules = acme.get("/admin/partitions").json()["partitions"][name]["granules"]
        assert os.sched_getaffinity(pid) == {cores()[granule] for granule in granules}
    for pid in (server.popen.pid, server.pid("(shared)"), server.pid("(unauth")):
        assert "onnxruntime" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_process_that_crashes_takes_down_its_tenant_only(server: Running, acme: httpx.Client) -> None:
    before = others(server) - {server.pid("acme")}
    with Load(server, "globex") as other:
        for _ in range(3):
            os.kill(server.pid("acme"), signal.SIGSEGV)
            with client(server, "acme") as http:
                until(lambda: answered(http) == 200)
            other.more()
    with client(server) as http:
        scraped = http.get("/metrics").text
    assert other.wrong == []
    assert before < others(server)
    assert 'greenlane_process_restarts_total{process="the HTTP process of acme"} 3.0\n' in scraped
    assert 'greenlane_process_restarts_total{process="the HTTP process of globex"} 0.0\n' in scraped
    assert 'greenlane_partition_utilization_ratio{device="0",partition=' in scraped


@pytest.mark.parametrize("start", [running, running_device], ids=["tenant process", "device process"])
def test_a_process_that_is_replaced_while_the_repository_is_away_serves_once_that_is_back(
    tmp_path: Path, start: Callable[[Path], AbstractContextManager[Running]]
) -> None:
    root, away = tmp_path / "models", tmp_path / "away"
    repository.write(root, "identity", repository.IDENTITY)
    with start(configure(tmp_path / "c.toml", root, tenant())) as server, client(server, "acme") as http:
        assert answered(http) == 200
        root.rename(away)
        for pid in server.devices() or [server.pid("acme")]:
            os.kill(pid, signal.SIGKILL)
        server.wait_for_log("the model repository cannot be read, which is tried again every 1 s")
        with client(server, "acme") as again:
            answer = infer(again, "identity", SMALL)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert again.get("/v2/health/ready").status_code == 503
            away.rename(root)
            until(lambda: answered(again) == 200)


@pytest.mark.parametrize("options", [[], ["--device"]], ids=["tenant process", "device process"])
def test_each_model_is_served_as_soon_as_a_replaced_process_has_it(tmp_path: Path, options: list[str]) -> None:
    """Also the first time, and where the process ended while another model was being loaded."""
    for name in ("identity", "late"):
        repository.write(tmp_path / "models", name, repository.IDENTITY)
    path, name = configure(tmp_path / "greenlane.toml", tmp_path / "models", IDENTITY), "dev 0" if options else "acme"
    with running_module("tests.end_to_end.gated_server", path, *options) as server:
        with client(server, "acme") as http:
            until(lambda: answered(http, "late") == 200)
            assert http.post("/v2/repository/models/late/load", json=OVERRIDE).status_code == 200
        os.mkfifo(tmp_path / "late")
        for _ in range(2):
            server.kill(name)
            with client(server, "acme") as http:
                until(lambda: answered(http) == 200)
                refused, ready = infer(http, "late", SMALL), http.get("/v2/models/late/ready")
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json() == ready.json() == {"error": "model 'late' is loading: try again soon"}
                assert http.get("/v2/models/identity/ready").status_code == 200
        with client(server, "acme") as http:
            (tmp_path / "late").write_bytes(b"")
            until(lambda: answered(http, "late") == 200)
            assert http.get("/v2/models/late/config").json()["max_batch_size"] == 3, "as it was loaded on request"


def test_requests_are_answered_503_while_a_process_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait until then, as most processes are replaced at once, and not for as long as it takes."""
    repository.write(tmp_path / "models", "identity", repository.IDENTITY)
    monkeypatch.setenv("NO_DEVICE", str(tmp_path / "gone"))
    path = configure(tmp_path / "greenlane.toml", tmp_path / "models", IDENTITY)
    with running_module("tests.end_to_end.gated_server", path) as server, Load(server, "globex") as other:
        (tmp_path / "gone").touch()
        server.kill("acme")
        with client(server, "acme") as http:
            refused = infer(http, "identity", SMALL)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), "its connection waited"
            why = "the process that serves this tenant cannot be started now, and the log says why; try again in a second"
            for asked in ("/v2/health/ready", "/v2/models/identity/ready"):
                answer = http.get(asked)
                assert (answer.status_code, answer.json()["error"]) == (503, why)
        with client(server, "globex") as http:
            assert http.get("/v2/health/ready").status_code == 200
            server.kill("(dispatcher)")
        with client(server, "acme") as http:
            assert http.get("/v2/health/ready").status_code == 503, "a new dispatcher knows it too"
            (tmp_path / "gone").unlink()
            until(lambda: answered(http) == 200)
        other.more()
    assert all("503" not in str(each) for each in other.wrong)


def test_a_replaced_process_has_the_granules_and_models_of_before(server: Running, acme: httpx.Client) -> None:
    assert acme.post("/v2/repository/models/identity/unload").status_code == 200
    server.kill("acme")
    with client(server, "acme") as http:
        until(lambda: refused(http) == "model 'identity' is unavailable: unloaded")
        until(lambda: http.post("/v2/repository/models/identity/load").status_code == 200)
        assert infer(http, "identity", SMALL).status_code == 200


def test_granules_move_between_processes_under_load(standard: Path, tmp_path: Path) -> None:
    """Each process prepares its tenant's new partition; no answer is lost or wrong."""
    if len(cores()) < 3:
        pytest.skip("one core has to be free")
    with running(configure(tmp_path / "greenlane.toml", standard, PAIR)) as server, client(server) as admin:
        with Load(server, "acme") as load, Load(server, "globex") as other:
            for counts in ({"acme": 2}, {"acme": 1, "globex": 2}, {"globex": 1}) * 3:
                moved = admin.put("/admin/partitions", json=counts)
                assert moved.status_code == 200, moved.text
                load.more(5)
        assert load.wrong == other.wrong == []


def test_a_repartition_that_does_not_fit_changes_nothing(server: Running, acme: httpx.Client) -> None:
    before = acme.get("/admin/partitions").json()
    refused = acme.put("/admin/partitions", json={"acme": len(cores())})
    assert refused.status_code == 409
    assert "acme" in refused.json()["error"]
    assert acme.get("/admin/partitions").json() == before
    assert threads(server.pid("acme")) >= {frozenset({cores()[before["partitions"]["acme"]["granules"][0]]})}


def refused(http: httpx.Client) -> str:
    """The error of an inference; "" if the connection was lost."""
    try:
        return str(infer(http, "identity", SMALL).json()["error"])
    except httpx.TransportError:
        return ""
