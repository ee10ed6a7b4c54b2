"""A device process for each tenant, as under MPS: what ends one ends no other, unless the GPU's MPS server fails for all."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from partitions.mps import COMMAND

from .harness import cores
from .processes import Load, Running, client, configure, running_apart
from .wire import SMALL, as_before, infer, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

TENANTS = """
[device]
backend = "cpu"
cores = "0-1"
mps = "on"
[tenants.acme]
granules = 1
models = ["*"]
memory = "64MiB"
[tenants.globex]
granules = 1
models = ["identity", "spin"]
memory = "64MiB"
"""
ACME, GLOBEX = "dev acme", "dev globex"


@pytest.fixture(scope="module")
def server(standard: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_apart(configure(tmp_path_factory.mktemp("mps") / "greenlane.toml", standard, TENANTS)) as server:
        yield server


def folder_of(server: Running) -> Path:
    """The folder of the daemon."""
    *_, line = (each for each in server.log if "the MPS daemon of GPU-0 runs in " in each)
    return Path(line.partition(" runs in ")[2].partition(",")[0])


@contextmanager
def client_of(server: Running) -> Iterator["subprocess.Popen[str]"]:
    """Another client of the daemon, with a simulated GPU."""
    variables = {
        f"CUDA_MPS_{name}_DIRECTORY": str(folder_of(server) / name.lower()[:4].rstrip("_")) for name in ("PIPE", "LOG")
    }
    words = [sys.executable, "-m", "tests.simulation.mps_client"]
    with subprocess.Popen(
        words, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout
        assert client.stdout.readline()
        yield client
        client.kill()


@pytest.fixture
def acme(server: Running) -> Iterator[httpx.Client]:
    with client(server, **{"X-Tenant": "acme"}) as http:
        until(lambda: as_before(http))
        yield http


@pytest.fixture
def globex(server: Running) -> Iterator[httpx.Client]:
    with client(server, **{"X-Tenant": "globex"}) as http:
        until(lambda: infer(http, "identity", SMALL).status_code == 200)
        yield http


def test_a_process_that_is_killed_takes_no_other_tenant_along(
    server: Running, acme: httpx.Client, globex: httpx.Client
) -> None:
    other = server.pid(GLOBEX)
    with Load(server, **{"X-Tenant": "acme"}) as load, Load(server, **{"X-Tenant": "globex"}) as beside:
        for _ in range(2):
            server.kill(ACME)
            until(lambda: infer(acme, "identity", SMALL).status_code == 503)
            until(lambda: as_before(acme))
            load.more()
            beside.more()
    assert beside.wrong == []
    assert load.wrong
    assert all(isinstance(each, tuple) and each[0] == 503 for each in load.wrong), "no connection is lost, no answer is wrong"
    assert server.pid(GLOBEX) == other


def test_a_fault_ends_all_processes_of_the_gpu_and_all_are_back_once_it_is_over(
    server: Running, acme: httpx.Client, globex: httpx.Client
) -> None:
    before = {server.pid(ACME), server.pid(GLOBEX)}
    with client_of(server) as other:
        print("fault", file=other.stdin, flush=True)
        for each in (acme, globex):
            until(lambda each=each: infer(each, "identity", SMALL).status_code == 503)
        until(lambda: not before & {*server.pids(ACME), *server.pids(GLOBEX)})
    until(lambda: as_before(acme))
    until(lambda: infer(globex, "identity", SMALL).status_code == 200)
    server.wait_for_log(
        "a kernel failed: every client of the MPS server of GPU-0 has to end; every process of it is started again"
    )


def test_a_daemon_that_is_killed_is_started_again_with_all_processes(
    server: Running, acme: httpx.Client, globex: httpx.Client
) -> None:
    daemon, before = folder_of(server), {server.pid(ACME), server.pid(GLOBEX)}
    os.kill(int((daemon / "pipe" / f"{COMMAND}.pid").read_text()), signal.SIGKILL)
    until(lambda: not before & {*server.pids(ACME), *server.pids(GLOBEX)})
    until(lambda: as_before(acme))
    until(lambda: infer(globex, "identity", SMALL).status_code == 200)
    assert folder_of(server) != daemon
    assert not daemon.exists()


def test_tenants_exchange_granules(server: Running, acme: httpx.Client, globex: httpx.Client) -> None:
    with Load(server, **{"X-Tenant": "acme"}) as load, Load(server, **{"X-Tenant": "globex"}) as beside:
        for granules in (3, 1):
            moved = acme.put("/admin/partitions", json={"acme": granules, "globex": 4 - granules})
            assert moved.status_code == 200, moved.text
            load.more()
            beside.more()
    assert load.wrong == beside.wrong == []
