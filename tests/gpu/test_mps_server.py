"""A server that gives each tenant of a GPU a device process, under an MPS daemon: right answers, and what an end takes along.

With OUT set, the figures go to $OUT/mps_server.json.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from partitions.mps import COMMAND

from . import test_two_devices as two
from .asking import asking
from .networks import add, plan
from .process import PATIENCE, Client, Served

pytestmark = pytest.mark.gpu
DEVICE = '[device]\nbackend = "cuda"\nmps = "on"\n'
TENANTS = "acme", "globex", "initech"
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 784], "datatype": "FP32", "data": [0.5] * 784}]}).encode()
LIMIT = 10
"""Seconds for which an inference may run."""
AGAIN = 10.0
"""Seconds until a tenant whose process was killed is served again, and all tenants after a fault. The goals are 2 and 5."""
QUIET = 1_000
"""Inferences of a third tenant before a process hangs or is killed."""
REPARTITIONS = 20
GROWTH = 100
"""MiB of the GPU that so many repartitions may take for good."""


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What was measured; printed in the end, and written to $OUT/mps_server.json where that is set."""
    yield from two.figures("mps_server.json")


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each device process of the server has a FIFO that makes it hang."""
    return tmp_path_factory.mktemp("hanging")


@pytest.fixture(scope="module")
def models(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which(COMMAND):
        pytest.skip(f"needs {COMMAND}")
    models = tmp_path_factory.mktemp("mps") / "models"
    for name, network in two.NETWORKS.items():
        plan(add(models, name), network())
    return models


@pytest.fixture(scope="module")
def server(models: Path, hanging: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    with two.serving(models, folder, DEVICE, tenants(), "tests.gpu.losing", {"HANG": str(hanging)}) as served:
        yield served


@pytest.fixture
def serving(server: Served) -> Served:
    """Once all tenants are served."""
    for name in TENANTS:
        until_ready(server, name)
    return server


def tenants() -> str:
    """Their sections of the configuration."""
    keys = f'granules = 4\nmodels = ["*"]\nmax_execution = "{LIMIT}s"\ndevice_memory = "1GiB"\n'
    return "".join(f"[tenants.{name}]\n{keys}" for name in TENANTS)


def until_ready(server: Served, tenant: str) -> None:
    """Wait until this tenant's models are all served."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        with closing(Client(server.port)) as client:
            if all(client.ask("GET", f"/v2/models/{name}/ready", tenant=tenant).status == 200 for name in two.NETWORKS):
                return
        time.sleep(0.02)
    raise AssertionError(server.log)


def process_of(server: Served, tenant: str) -> int:
    """The tenant's device process, whatever MPS says."""
    return server.device_process(tenant)


def daemon_of(server: Served) -> tuple[str, Path]:
    """The UUID of its GPU, and the daemon's folder."""
    *_, line = (each for each in server.log.splitlines() if "the MPS daemon of " in each and " runs in " in each)
    uuid, _, rest = line.partition("the MPS daemon of ")[2].partition(" runs in ")
    return uuid, Path(rest.partition(",")[0])


@contextmanager
def client_of(server: Served, module: str = "tests.gpu.mps_client") -> Iterator["subprocess.Popen[str]"]:
    """Another client of the same daemon."""
    uuid, folder = daemon_of(server)
    variables = {f"CUDA_MPS_{name.upper()}_DIRECTORY": str(folder / name) for name in ("pipe", "log")}
    variables["CUDA_VISIBLE_DEVICES"] = uuid
    words = [sys.executable, "-m", module]
    with subprocess.Popen(
        words, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout
        try:
            assert json.loads(client.stdout.readline())["client"]
            yield client
        finally:
            client.kill()


def check_all(server: Served, seed: int) -> None:
    """All models of all tenants answer right."""
    with closing(Client(server.port)) as client:
        for name in TENANTS:
            two.check(client, name, seed)


def used(server: Served) -> int:
    """MiB of the server's GPU that are taken."""
    command = ["nvidia-smi", f"--id={daemon_of(server)[0]}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


def test_auto_finds_that_it_can_give_each_tenant_a_process_and_its_trial_disturbs_none(models: Path, tmp_path: Path) -> None:
    """Which is the default."""
    with two.serving(models, tmp_path, DEVICE.replace('mps = "on"\n', ""), tenants()) as served:
        for name in TENANTS:
            until_ready(served, name)
        assert len({process_of(served, name) for name in TENANTS}) == len(TENANTS)
        assert f'a device process for each of its {len(TENANTS)} tenants, under MPS (mps = "auto")' in served.log
        assert "a kernel failed" not in served.log
        check_all(served, 8)
        (_, folder) = daemon_of(served)
    assert not folder.exists()


def test_each_tenant_gets_right_answers_from_a_process_of_its_own(serving: Served) -> None:
    assert " under MPS, " in serving.admin("GET", "device")["description"]
    assert len({process_of(serving, name) for name in TENANTS}) == len(TENANTS)
    probed = serving.admin("POST", "partitions/probe")
    assert (probed["overlaps"], {each["located"] for each in probed["partitions"].values()}) == ([], {None})
    check_all(serving, 1)
    assert "does not take turns with the GPU's others" not in serving.log


def test_a_process_whose_inference_does_not_end_is_ended_and_others_notice_nothing(
    serving: Served, hanging: Path, found: dict[str, Any]
) -> None:
    processes = [process_of(serving, name) for name in TENANTS]
    with asking(serving.port, "globex") as globex, closing(Client(serving.port)) as client:
        began = time.monotonic()
        two.milliseconds(client, "initech", QUIET)
        (hanging / str(processes[0])).write_bytes(b"hang")
        hung = time.monotonic()
        answered = list[int]()
        while 503 not in answered:
            answered.append(client.ask("POST", "/v2/models/mlp/infer", BODY, "acme").status)
            assert time.monotonic() < hung + PATIENCE
        noticed = time.monotonic()
        until_ready(serving, "acme")
        ended = time.monotonic()
    assert set(answered) <= {200, 504, 503}
    assert globex.wrong == []
    assert [process_of(serving, name) for name in TENANTS[1:]] == processes[1:]
    assert f"an inference of tenant acme has been running for {LIMIT + 5} s and cannot be stopped; ending it" in serving.log
    found["an inference does not end: seconds until it is answered, until its tenant is served, limit"] = [
        round(noticed - hung, 2),
        round(ended - hung, 2),
        LIMIT,
    ]
    found["p99 of another tenant, ms: quiet, meanwhile"] = [
        two.p99(globex.during(began, hung)),
        two.p99(globex.during(hung, ended)),
    ]
    check_all(serving, 6)


def test_a_process_that_takes_a_tenant_s_sms_is_noticed_and_no_partition_changes_meanwhile(
    serving: Served, found: dict[str, Any]
) -> None:
    before = serving.admin("GET", "partitions")["partitions"]
    (owner,) = (name for name in TENANTS if 0 in before[name]["granules"])
    one, other = (name for name in TENANTS if name != owner)
    with client_of(serving) as client, closing(Client(serving.port)) as asking:
        print("hold", file=client.stdin, flush=True)
        assert json.loads(client.stdout.readline()) == {"done": "hold"}
        overlaps = serving.admin("POST", "partitions/probe")["overlaps"]
        assert overlaps == [{"tenants": sorted((owner, name)), "units": []} for name in (one, other)]
        counts = {name: len(before[name]["granules"]) for name in (one, other)}
        counts = {one: counts[one] - 1, other: counts[other] + 1}
        answer = asking.ask("PUT", "/admin/partitions", json.dumps(counts).encode())
        print("wait", file=client.stdin, flush=True)
        assert json.loads(client.stdout.readline()) == {"done": "wait"}
    assert answer.status == 500
    assert b"did not have all their units at the same time" in (answer.body or b"")
    assert serving.admin("GET", "partitions")["partitions"] == before
    began = time.monotonic()
    assert serving.admin("POST", "partitions/probe")["overlaps"] == []
    found["a probe of all placements, s"] = round(time.monotonic() - began, 4)
    check_all(serving, 7)


def test_a_process_that_is_killed_in_work_is_not_noticed_by_other_tenants(serving: Served, found: dict[str, Any]) -> None:
    others = [process_of(serving, name) for name in TENANTS[1:]]
    with asking(serving.port, "acme") as acme, asking(serving.port, "globex") as globex:
        began = time.monotonic()
        with closing(Client(serving.port)) as client:
            two.milliseconds(client, "initech", QUIET)
        killed = time.monotonic()
        os.kill(process_of(serving, "acme"), signal.SIGKILL)
        with closing(Client(serving.port)) as client:
            while client.ask("GET", "/v2/models/mlp/ready", tenant="acme").status == 200:
                time.sleep(0.002)
        until_ready(serving, "acme")
        ended = time.monotonic()
    assert acme.refused, "it was killed in the middle of work"
    assert all(text.startswith("refused") for text in acme.wrong), acme.wrong
    assert globex.wrong == []
    assert [process_of(serving, name) for name in TENANTS[1:]] == others
    quiet, during = globex.during(began, killed), globex.during(killed, ended)
    found["a process killed in work: seconds until its tenant is answered, and all its models are served"] = [
        round(acme.again() - killed, 2),
        round(ended - killed, 2),
    ]
    found["p99 of another tenant, ms: quiet, meanwhile"] = [two.p99(quiet), two.p99(during)]
    assert acme.again() - killed < AGAIN
    check_all(serving, 2)


def test_a_fault_ends_the_processes_of_all_tenants_idle_ones_too_and_all_are_served_again(
    serving: Served, found: dict[str, Any]
) -> None:
    before = {process_of(serving, name) for name in TENANTS}
    with client_of(serving) as other:
        began = time.monotonic()
        print("fault", file=other.stdin, flush=True)
        while before & {one.pid for one in serving.process.family()}:
            assert time.monotonic() < began + PATIENCE, serving.log
            time.sleep(0.01)
    seconds = {}
    for name in TENANTS:
        until_ready(serving, name)
        seconds[name] = round(time.monotonic() - began, 2)
    found["a fault: seconds until each tenant is served again"] = seconds
    check_all(serving, 3)
    assert "a kernel failed: every client of the MPS server of GPU-" in serving.log
    assert max(seconds.values()) < AGAIN


def test_tenants_exchange_granules_while_all_are_asked(serving: Served, found: dict[str, Any]) -> None:
    took, before = list[float](), used(serving)
    with two.Asking(serving.port, "acme") as one, two.Asking(serving.port, "globex") as other:
        for turn in range(REPARTITIONS):
            began = time.monotonic()
            counts = {"acme": 5 - turn % 2 * 2, "globex": 3 + turn % 2 * 2}
            serving.admin("PUT", "partitions", counts)
            held = serving.admin("GET", "partitions")["partitions"]
            assert {name: len(held[name]["granules"]) for name in counts} == counts
            took.append((time.monotonic() - began) * 1e3)
            one.more(20)
            other.more(20)
    assert (one.wrong, other.wrong) == ([], [])
    found["a repartition of two tenants, ms: median, slowest"] = [sorted(took)[len(took) // 2], max(took)]
    found[f"MiB of the GPU before and after {REPARTITIONS} repartitions"] = [before, after := used(serving)]
    assert after - before < GROWTH
    check_all(serving, 4)


def test_a_daemon_that_is_killed_is_started_again_with_all_processes(serving: Served, found: dict[str, Any]) -> None:
    (_, folder), before = daemon_of(serving), {process_of(serving, name) for name in TENANTS}
    began = time.monotonic()
    os.kill(int((folder / "pipe" / f"{COMMAND}.pid").read_text()), signal.SIGKILL)
    while before & {one.pid for one in serving.process.family()}:
        assert time.monotonic() < began + PATIENCE, serving.log
        time.sleep(0.01)
    for name in TENANTS:
        until_ready(serving, name)
    found["a killed daemon: seconds until all tenants are served again"] = round(time.monotonic() - began, 2)
    check_all(serving, 5)
    assert daemon_of(serving)[1] != folder
    assert not folder.exists()
