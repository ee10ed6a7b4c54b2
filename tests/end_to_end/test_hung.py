"""Hung processes and endless inferences: how soon they are detected, and that other tenants are served meanwhile."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import httpx
import pytest

from benchmarks.watched_server import alive
from server.config.tenant import TenantConfig

from .fixtures import server_with
from .harness import configuration, cores, serving
from .processes import Load, Running, configure, running, running_module, tenant
from .virtual import VirtualDevice
from .wire import FOREVER, SMALL, Connection, Listening, answered, client, infer, lane, posted, spin, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

TENANTS = tenant("acme", "identity", "spin") + tenant("globex", "identity")


server = server_with(TENANTS, watchdog='"60s"')


def stop(pid: int) -> float:
    """Stop a process with SIGSTOP; returns the time of `time.monotonic` when it stands still.

    It does only once it gets a core, for which one of the lowest priority may have to wait where other things run.
    """
    os.kill(pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TtXZ")
    return time.monotonic()


def state(server: Running, pid: int) -> str:
    return next((one.state for one in server.family() if one.pid == pid), "X")


def replaced(server: Running) -> int:
    """How many processes did not answer so far."""
    return sum("has not answered for " in line for line in server.log)


@pytest.mark.parametrize("name", ["acme", "(shared)", "(unauthenticated)", "(dispatcher)"])
def test_a_stopped_process_is_replaced_without_errors_for_other_tenants(server: Running, name: str) -> None:
    before = replaced(server)
    with Load(server, "globex") as load:
        pid = server.pid(name)
        stopped = stop(pid)
        server.wait_for_log("has not answered for ", before + 1)
        until(lambda: state(server, pid) in "XZ")
        with client(server, "acme") as acme, client(server) as anonymous:
            until(lambda: answered(acme) == 200)
            took = time.monotonic() - stopped
            assert anonymous.get("/v2/health/ready").status_code == 200
            assert anonymous.get("/v2/models/identity", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert took < 15, "it takes less than 5 s where nothing else runs"
        load.more()
        assert load.wrong == []


def test_metrics_of_a_stopped_process_are_answered_with_their_age(server: Running, acme: httpx.Client) -> None:
    before = replaced(server)
    with client(server) as anonymous:
        counted = next(line for line in anonymous.get("/metrics").text.splitlines() if line.startswith(COUNTED))
        assert float(counted.split()[-1]) > 0
        stop(server.pid("acme"))
        asked = time.monotonic()
        metrics = anonymous.get("/metrics").text
        assert time.monotonic() - asked < 10
        assert replaced(server) == before, "they did not wait until it was replaced"
        assert counted in metrics, "the last report is still shown"
        assert _age(metrics, "acme") > 0
        assert _age(metrics, "globex") == 0
        tenants = {tenant["name"]: tenant for tenant in anonymous.get("/admin/tenants").json()["tenants"]}
        assert {entry["name"] for entry in tenants["acme"]["models"]} == {"identity", "spin"}
        server.wait_for_log("has not answered for 3.", before + 1)
        until(lambda: _age(anonymous.get("/metrics").text, "acme") == 0)


COUNTED = 'nv_inference_request_success{model="identity",partition="0",tenant="acme",version="1"}'


def _age(metrics: str, tenant: str) -> float:
    line = next(line for line in metrics.splitlines() if line.startswith(f'greenlane_report_age_seconds{{tenant="{tenant}"}}'))
    return float(line.split()[-1])


def test_a_process_starved_of_cpu_is_not_replaced(server: Running, acme: httpx.Client) -> None:
    """At the lowest priority it shares a core with four busy processes, as on a slow machine."""
    before = replaced(server)
    pid = server.pid("acme")
    os.sched_setaffinity(pid, {cores()[0]})
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    words = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cores()[0]}}})\nwhile True: pass"]
    hogs = [subprocess.Popen(words) for _ in range(4)]
    try:
        begun = time.monotonic()
        while time.monotonic() - begun < 6:
            assert infer(acme, "identity", SMALL).status_code == 200
        assert server.pid("acme") == pid
        assert replaced(server) == before
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        server.kill("acme")  # The next has its own priority again.


def test_a_stopped_forkserver_is_replaced(server: Running) -> None:
    with client(server, "acme") as acme:
        until(lambda: answered(acme) == 200)  # Its process may have been ended by the test before.
        parent = next(one.parent for one in server.family() if one.pid == server.pid("acme"))
        stop(parent)
        os.kill(server.pid("acme"), signal.SIGKILL)
        until(lambda: answered(acme) == 200)
    server.wait_for_log("the forkserver has been stopped for 2.")


@contextmanager
def endless(server: Listening, admin: httpx.Client) -> Iterator[Connection]:
    """A connection that waits for an inference of acme's that never ends."""
    with Connection(server) as connection:
        connection.send(posted("spin", spin(FOREVER), "X-Tenant: acme"))
        until(lambda: lane(admin)["in_flight"] == 1)
        yield connection


def configured(folder: Path, repository: Path, more: Mapping[str, object] = MappingProxyType({}), **settings: str) -> Path:
    tenants = tenant("acme", "identity", "spin", in_flight=1, **more) + tenant("globex", "identity")
    return configure(folder / "e.toml", repository, tenants, **settings)


def test_a_repartition_behind_an_endless_inference_is_409_and_all_are_served(standard: Path) -> None:
    names = ("acme", "globex", "initech")
    tenants = [TenantConfig(name=name, granules=2, models=("identity", "spin"), in_flight=1) for name in names]
    config = configuration(standard, *tenants, max_pause=1.0)
    with (
        serving(config, VirtualDevice(8)) as served,
        client(served) as admin,
        client(served, "globex") as globex,
        client(served, "acme") as acme,
    ):
        before = admin.get("/admin/partitions").json()
        with endless(served, admin) as connection:
            for _ in range(2):
                begun = time.monotonic()
                answer = admin.put("/admin/partitions", json={"acme": 1, "globex": 3})
                assert answer.status_code == 409
                assert "tenant acme: " in answer.json()["error"]
                assert "all tenants are served as before" in answer.json()["error"]
                assert infer(globex, "identity", SMALL).status_code == 200
                assert globex.post("/v2/repository/models/identity/load").status_code == 200
                assert admin.post("/admin/partitions/probe").status_code == 200
                assert time.monotonic() - begun < 15
            assert admin.get("/admin/partitions").json() == before
            assert admin.put("/admin/partitions", json={"globex": 3}).json()["moved"] == ["globex"]
            connection.close()
        assert infer(acme, "identity", SMALL).status_code == 200
        until(lambda: admin.put("/admin/partitions", json={"acme": 1}).status_code == 200)
        assert infer(acme, "identity", SMALL).status_code == 200


def repartitioned(admin: httpx.Client, counts: dict[str, int], client: httpx.Client) -> tuple[httpx.Response, float]:
    """The answer to a repartition, and the seconds of the slowest of this client's requests meanwhile."""
    with ThreadPoolExecutor(1) as others:
        moving, took = others.submit(admin.put, "/admin/partitions", json=counts), [0.0]
        while not wait([moving], timeout=0.005).done:
            begun = time.monotonic()
            assert infer(client, "identity", SMALL).status_code == 200
            took.append(time.monotonic() - begun)
        return moving.result(), max(took)


def test_a_tenant_is_served_while_its_repartition_waits_for_an_endless_inference(standard: Path) -> None:
    tenants = [TenantConfig(name=name, granules=2, models=("identity", "spin"), in_flight=1) for name in ("globex", "acme")]
    max_pause = 2.0
    config = configuration(standard, *tenants, max_pause=max_pause)
    with (
        serving(config, VirtualDevice(8)) as served,
        client(served) as admin,
        client(served, "globex") as globex,
        endless(served, admin) as connection,
    ):
        answer, longest = repartitioned(admin, {"acme": 1, "globex": 3}, globex)
        connection.close()
        assert answer.status_code == 409
        assert longest < max_pause, "it waited for the repartition"


def test_a_tenant_in_another_process_is_served_while_their_repartition_waits_for_an_endless_inference(
    standard: Path, tmp_path: Path
) -> None:
    pause = 2.0
    config = configured(tmp_path, standard, max_pause=f'"{pause:g}s"')
    config.write_text(config.read_text().replace("granules = 1", "granules = 6"))
    with (
        running_module("benchmarks.virtualcores", config, "--in-order") as server,
        client(server) as admin,
        client(server, "globex") as globex,
        endless(server, admin) as connection,
    ):
        answer, longest = repartitioned(admin, {"acme": 5, "globex": 7}, globex)
        connection.close()
        assert answer.status_code == 409
        assert "tenant acme: an inference has been running for 2 s" in answer.json()["error"]
        assert longest < pause / 2, "it waited for the repartition"


def test_an_inference_over_max_execution_is_stopped_with_504(standard: Path, tmp_path: Path) -> None:
    config = configured(tmp_path, standard, {"max_execution": "1s"})
    with running(config) as server, Connection(server) as connection:
        connection.send(posted("spin", spin(FOREVER), "X-Tenant: acme"))
        answer = connection.answer()
        text = "the inference was stopped after 1 s, its limit (tenants.acme.max_execution)"
        assert (answer.status, answer.json["error"]) == (504, text)
        with client(server, "acme") as acme:
            assert infer(acme, "identity", SMALL).status_code == 200


def test_a_process_is_replaced_whose_inference_cannot_be_stopped(standard: Path, tmp_path: Path) -> None:
    config = configured(tmp_path, standard, {"max_execution": "1s"})
    with (
        running_module("tests.end_to_end.unstoppable_server", config) as server,
        Load(server, "globex") as other,
    ):
        first, beside = server.pid("acme"), server.pid("globex")
        with Connection(server) as connection:
            connection.send(posted("spin", spin(FOREVER), "X-Tenant: acme"))
            assert connection.answer().status == 503
        server.wait_for_log("cannot be stopped; ending it")
        with client(server, "acme") as acme:
            until(lambda: answered(acme) == 200)
        assert server.pid("acme") != first
        assert server.pid("globex") == beside
        other.more()


@pytest.mark.parametrize("killed", [False, True])
def test_shutdown_is_on_time_despite_an_endless_inference(standard: Path, tmp_path: Path, killed: bool) -> None:
    config = configured(tmp_path, standard, drain_timeout='"4s"')
    with running(config) as server, client(server) as admin, endless(server, admin) as connection:
        family = server.family()
        if killed:
            stop(server.pid("acme"))
        signalled = time.monotonic()
        server.signal()
        if not killed:
            answer = connection.answer()
            assert (answer.status, "the server is draining" in answer.json["error"]) == (503, True)
        assert server.wait(60) == 0
        assert time.monotonic() - signalled < 4 + 10
        until(lambda: not alive(family))


@pytest.mark.parametrize(
    "names", [("acme",), ("(shared)", "(dispatcher)"), ("acme", "globex", "(shared)", "(unauthenticated)", "(dispatcher)")]
)
def test_shutdown_is_on_time_despite_stopped_processes(standard: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    with running(configure(tmp_path / "c.toml", standard, TENANTS, watchdog='"60s"')) as server:
        family = server.family()
        for name in names:
            stop(server.pid(name))
        signalled = time.monotonic()
        server.signal()
        assert server.wait(60) == 0
        assert time.monotonic() - signalled < 10 + 5, "drain_grace is 0; 5 s for a machine that does other things, too"
        until(lambda: not alive(family))
