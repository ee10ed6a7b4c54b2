"""The device process ends: its tenants' requests are answered 503 at once, and they are served again; nothing else ends."""

import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from benchmarks.watched_server import alive

from .fixtures import server_with
from .harness import PATIENCE, cores
from .processes import PAIR, Load, Running, configure, running_device, tenant
from .wire import FOREVER, SMALL, answered, as_before, client, infer, lane, spin, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

DEVICE = "dev 0"
ENDED = "the device process has ended and is being started again"


server = server_with(PAIR, running_device, scope="function")


def others(server: Running) -> set[int]:
    """The processes of the server, without the device process and the watchdogs, which belong to a process each."""
    return {one.pid for one in server.family() if one.name.startswith("greenlane") and "dev " not in one.name}


def test_requests_are_answered_503_at_once_and_served_again_when_the_device_process_was_killed(
    server: Running, acme: httpx.Client
) -> None:
    before = others(server)
    with Load(server, "acme") as load, Load(server, "globex") as other:
        for _ in range(3):
            server.kill(DEVICE)
            until(lambda: infer(acme, "identity", SMALL).status_code == 503)
            until(lambda: as_before(acme))
            load.more()
            other.more()
    wrong = [each for one in (load, other) for each in one.wrong]
    assert all(isinstance(each, tuple) and each[0] == 503 for each in wrong), "no connection is lost, no answer is wrong"
    assert any(ENDED in str(each) for each in wrong)
    assert others(server) == before


def test_a_model_is_not_ready_from_the_kill_of_the_device_process_until_it_is_served_again(
    server: Running, acme: httpx.Client
) -> None:
    os.kill(server.pid(DEVICE), signal.SIGKILL)
    until(lambda: infer(acme, "identity", SMALL).status_code == 503)
    seen = []
    while not seen or seen[-1][1] != 200:
        ready, served = acme.get("/v2/models/identity/ready"), infer(acme, "identity", SMALL)
        seen.append((ready.status_code, served.status_code, ready.headers.get("retry-after")))
    assert seen[:-1] == [(503, 503, "1")] * (len(seen) - 1), "each readiness was asked before the inference"
    assert len(seen) > 1
    assert acme.get("/v2/models/identity/ready").status_code == 200


def test_an_inference_in_flight_is_answered_503_when_the_device_process_is_killed(server: Running, acme: httpx.Client) -> None:
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(infer(acme, "spin", spin(FOREVER))))
    asking.start()
    until(lambda: lane(acme)["in_flight"] == 1)
    server.kill(DEVICE)
    asking.join(PATIENCE)
    assert [answer.status_code for answer in answers] == [503]
    assert ENDED in answers[0].text
    until(lambda: infer(acme, "identity", SMALL).status_code == 200)
    assert lane(acme)["in_flight"] == 0


def test_a_repartition_survives_the_device_process(standard: Path, tmp_path: Path) -> None:
    with (
        running_device(configure(tmp_path / "greenlane.toml", standard, tenant())) as server,
        client(server, "acme") as http,
    ):
        moved = http.put("/admin/partitions", json={"acme": 2})
        assert moved.status_code == 200, moved.text
        server.kill(DEVICE)
        until(lambda: as_before(http))
        assert http.get("/admin/partitions").json()["partitions"]["acme"]["size"] == 2
        assert http.post("/admin/partitions/probe").json()["partitions"]["acme"]["located"] == sorted(cores()[:2])


def test_models_are_loaded_and_unloaded_after_the_device_process_was_replaced(server: Running, acme: httpx.Client) -> None:
    server.kill(DEVICE)
    until(lambda: as_before(acme))
    assert acme.post("/v2/repository/models/identity/unload").status_code == 200
    assert infer(acme, "identity", SMALL).status_code == 503
    assert acme.post("/v2/repository/models/identity/load").status_code == 200
    assert infer(acme, "identity", SMALL).status_code == 200


def test_the_device_process_and_an_http_process_are_killed_at_once(server: Running, acme: httpx.Client) -> None:
    for _ in range(3):
        server.kill(DEVICE, "acme")
        with client(server, "acme") as http, client(server, "globex") as other:
            until(lambda: answered(http) == 200)
            until(lambda: answered(other) == 200)


def test_a_device_process_that_stays_stopped_is_replaced(standard: Path, tmp_path: Path) -> None:
    """Its own watchdog does not count the time for which it is stopped."""
    with (
        running_device(configure(tmp_path / "greenlane.toml", standard, PAIR, watchdog='"2s"')) as server,
        client(server, "acme") as http,
    ):
        os.kill(stopped := server.pid(DEVICE), signal.SIGSTOP)
        assert ENDED in infer(http, "identity", SMALL).text, "it waits until the process is killed"
        until(lambda: infer(http, "identity", SMALL).status_code == 200)
        assert server.pid(DEVICE) != stopped
        server.wait_for_log("the device process has been stopped for 2.")


def test_the_supervisor_has_no_device_and_takes_every_process_with_it_when_it_is_killed(server: Running) -> None:
    assert server.pid(DEVICE) != server.popen.pid
    maps = Path(f"/proc/{server.popen.pid}/maps").read_text()
    assert "onnxruntime" not in maps, "models are loaded where the device is"
    family = server.family()
    os.kill(server.popen.pid, signal.SIGKILL)
    until(lambda: not alive(family))
