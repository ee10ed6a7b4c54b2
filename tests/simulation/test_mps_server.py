"""Tests of a server under MPS in tests/gpu on simulated GPUs, with fake daemons; and moves between two of them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from tests.end_to_end.wire import until
from tests.gpu import test_mps_server as real
from tests.gpu import test_two_devices as two
from tests.gpu.networks import add
from tests.gpu.process import PATIENCE, Client, Served

from .mps import FakeMps
from .mps_daemon import NAME, PIPES
from .plans import make_plan
from .shared import NAME as NAME_OF_SHARED

pytestmark = pytest.mark.usefixtures("forked_programs")
HEAP = 64 << 20
serving, hanging = real.serving, real.hanging
test_answers = real.test_each_tenant_gets_right_answers_from_a_process_of_its_own
test_an_endless_inference = real.test_a_process_whose_inference_does_not_end_is_ended_and_others_notice_nothing
test_a_proof = real.test_a_process_that_takes_a_tenant_s_sms_is_noticed_and_no_partition_changes_meanwhile
test_a_killed_process = real.test_a_process_that_is_killed_in_work_is_not_noticed_by_other_tenants
test_a_fault = real.test_a_fault_ends_the_processes_of_all_tenants_idle_ones_too_and_all_are_served_again
test_repartitions = real.test_tenants_exchange_granules_while_all_are_asked
test_a_killed_daemon = real.test_a_daemon_that_is_killed_is_started_again_with_all_processes


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    """As there; nothing is measured."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def simulated() -> Iterator[None]:
    """Clients and memory of the simulation in place of those of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        client = real.client_of
        patch.setattr(real, "client_of", lambda server: client(server, "tests.simulation.mps_client"))
        patch.setattr(real, "used", lambda server: 0)
        patch.setattr(real, "REPARTITIONS", 4)
        patch.setattr(real, "LIMIT", 2)
        patch.setattr(real, "AGAIN", 120)
        patch.setattr(real, "QUIET", 100)
        patch.setattr(real, "asking", partial(real.asking, pause=0.005))
        patch.setattr(two, "ASKED", 100)
        patch.setattr(two, "PAUSE", 0.005)  # What starts meanwhile needs the cores.
        yield


def prepare(folder: Path, **behaviour: int | str) -> dict[str, str]:
    """Models and a fake daemon in this folder; the environment of a server that finds it."""
    for name, network in two.NETWORKS.items():
        (add(folder / "models", name) / "model.plan").write_bytes(make_plan(network().onnx, network().ranges))
    fake = FakeMps(folder / "fake")
    fake.behave(**behaviour)
    return {"PATH": f"{fake.folder}:{os.environ['PATH']}"}


def start(
    folder: Path, devices: str, tenants: str, hanging: Path | None = None, **behaviour: int
) -> AbstractContextManager[Served]:
    environment = prepare(folder, **behaviour) | ({"HANG": str(hanging)} if hanging else {})
    return two.serving(folder / "models", folder, devices, tenants, "tests.simulation.losing", environment)


@pytest.fixture(scope="module")
def server(hanging: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with start(tmp_path_factory.mktemp("mps"), real.DEVICE, real.tenants(), hanging) as served:
        yield served


@pytest.mark.parametrize("clients", [48, 0])
def test_each_tenant_has_a_process_of_its_own_by_itself_where_processes_can_be_clients(tmp_path: Path, clients: int) -> None:
    """As by default."""
    devices, names = real.DEVICE.replace('mps = "on"\n', ""), ("acme", "globex", "initech")
    with start(tmp_path, devices, real.tenants(), most=clients) as server:
        for name in names:
            real.until_ready(server, name)
        real.check_all(server, 1)
        found = {one.name for one in server.process.family() if one.name.startswith("greenlane dev")}
        description = server.admin("GET", "device")["description"]
        left = daemons(server)
    if clients:
        assert found == {f"greenlane dev {name}"[:15] for name in names}
        assert 'device 0: a device process for each of its 3 tenants, under MPS (mps = "auto")' in server.log
    else:
        assert found == {"greenlane dev 0"}
        assert 'WARNING greenlane.processes: device 0: one device process for all tenants (mps = "auto"): ' in server.log
    assert (" under MPS, " in description, len(left)) == (clients > 0, clients > 0)


def test_a_server_whose_daemon_does_not_start_ends_with_a_status_after_which_it_is_tried_again(tmp_path: Path) -> None:
    """Not with that of a wrong configuration, after which systemd leaves it (deploy/greenlane.service)."""
    path, words = tmp_path / "greenlane.toml", ["[models]", f'repository = "{tmp_path}"', real.DEVICE, real.tenants()]
    path.write_text("\n".join(words))
    command = [sys.executable, "-m", "tests.simulation.losing", "--config", str(path), "--port", "0"]
    environment = os.environ | prepare(tmp_path, server="ends")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "\ngreenlane: the MPS server of GPU-5ea1 ended during its start; it printed: " in ended.stderr
    assert "the configuration cannot be served" not in ended.stderr


@pytest.mark.parametrize("mps", ["auto", "off"])
def test_beside_a_daemon_of_the_operator_s_all_tenants_share_a_process_outside_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mps: str
) -> None:
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    monkeypatch.setenv(PIPES, str(pipes))
    with subprocess.Popen([FakeMps(tmp_path / "theirs").folder / NAME, "-f"]) as theirs:
        try:
            until((pipes / "control").exists)
            with start(tmp_path, real.DEVICE.replace('"on"', f'"{mps}"'), real.tenants()) as server:
                for name in real.TENANTS:
                    real.until_ready(server, name)
                real.check_all(server, 1)
                assert " under MPS, " not in server.admin("GET", "device")["description"]
                assert (f"an MPS daemon of yours runs in {pipes}" in server.log) == (mps == "auto")
        finally:
            theirs.kill()


def test_a_tenant_is_fenced_while_all_serve_also_for_the_sake_of_one_that_comes(tmp_path: Path) -> None:
    """Each has a device process of its own."""
    sections = [f"[tenants.{each}" for each in real.tenants().split("[tenants.")[1:]]
    with start(tmp_path, real.DEVICE, "".join(sections[:2])) as server:
        for name in real.TENANTS[:2]:
            real.until_ready(server, name)
        path = tmp_path / "greenlane.toml"
        before = path.read_text()
        with two.Asking(server.port, "acme") as fenced, two.Asking(server.port, "globex") as beside:
            path.write_text(before.replace(sections[0], sections[0] + 'memory_bandwidth = 0.2\npcie = "1GB/s"\n') + sections[2])
            server.admin("POST", "reload")
            until(lambda: len(fence_of(server, "acme").get("granules", [])) == 1)
            fenced.more(20)
            beside.more(20)
            with two.Asking(server.port, "initech") as came:
                came.more(20)
            path.write_text(before)
            server.admin("POST", "reload")
            until(lambda: fence_of(server, "acme") == {})
            fenced.more(20)
            beside.more(20)
        assert (fenced.wrong, beside.wrong, came.wrong) == ([], [], [])


def fence_of(server: Served, tenant: str) -> dict[str, Any]:
    return dict(server.admin("GET", "partitions")["partitions"][tenant].get("fence") or {})


def shared(process: int) -> set[str]:
    """The inodes of device memory that this process shares."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if NAME_OF_SHARED in line}


def test_the_processes_of_all_tenants_share_one_memory_also_with_one_that_is_started_again(serving: Served) -> None:
    """In which their copies take turns."""
    processes = [real.process_of(serving, name) for name in real.TENANTS]
    (before,) = set.union(*map(shared, processes))
    assert [shared(process) for process in processes] == [{before}] * len(processes)
    os.kill(processes[0], signal.SIGKILL)
    with closing(Client(serving.port)) as client:
        while client.ask("GET", "/v2/models/mlp/ready", tenant="acme").status == 200:
            sleep(0.002)
    real.until_ready(serving, "acme")
    assert shared(real.process_of(serving, "acme")) == {before}


def heaps(process: int) -> int:
    """The heaps that glibc has made for threads of this process: each reserves 64 MiB, at a multiple of that."""
    lines = [line.split() for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
    spans = [([int(end, 16) for end in words[0].split("-")], words[1]) for words in lines]
    return sum(
        begin % HEAP == 0 and end == after and last - begin == HEAP and (mode, free) == ("rw-p", "---p")
        for ((begin, end), mode), ((after, last), free) in pairwise(spans)
    )


def test_the_threads_of_a_tenant_s_process_share_one_heap(serving: Served) -> None:
    """As each load of a model took memory from another one (docs/lab/2026-11-27-heaps.md)."""
    assert {name: heaps(real.process_of(serving, name)) for name in real.TENANTS} == dict.fromkeys(real.TENANTS, 0)


def daemons(server: Served) -> set[int]:
    """The MPS daemons, without their servers, that there are now."""
    mps = {one.pid: one for one in server.process.family() if one.name == NAME[:15]}
    return {pid for pid, one in mps.items() if one.parent not in mps}


def works(server: Served, tenant: str) -> int:
    """How often a tenant's model mlp ran, on all devices."""
    used = [each for each in server.admin("GET", "usage")["tenants"] if each["tenant"] == tenant]
    return sum(model["works"] for each in used for model in each["models"] if model["name"] == "mlp")


def test_a_tenant_moves_to_the_other_gpu_and_back_to_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPS", "on")
    with start(tmp_path, two.devices(), two.TENANTS) as server:
        with two.Asking(server.port, "acme") as moving, two.Asking(server.port, "globex") as beside:
            for to in "10":
                moved = server.admin("PUT", "tenants/acme/device", {"device": to, "granules": 4})
                assert moved["partitions"]["acme"]["device"] == to
                moving.more(20)
                beside.more(20)
        assert (moving.wrong, beside.wrong) == ([], [])
        for name, asked in (("acme", moving), ("globex", beside)):
            uncounted = len(asked.took) - works(server, name)
            assert uncounted in (0, 1), "a GPU says of an executor's last work when the next one begins, or it is closed"
        two.check_both(server)
        both = daemons(server)
        assert len(both) == 2
        with two.Asking(server.port, "globex") as last:
            server.admin("PUT", "tenants/globex/device", {"device": "0", "granules": 4})
            left = daemons(server)
            assert len(left) == 1
            assert left < both, "the GPU without tenants has none"
            last.more(20)
            server.admin("PUT", "tenants/globex/device", {"device": "1", "granules": 4})
            (again,) = daemons(server) - left
            os.kill(again, signal.SIGKILL)
            server.process.wait_for_log("the process of device 1 for globex serves again")
        with two.Asking(server.port, "globex") as last:
            last.more(20)
        assert last.wrong == []
        assert len(daemons(server)) == 2
