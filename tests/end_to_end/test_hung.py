"""Processes that hang: who notices, within what time, and what the others get meanwhile."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import cores
from .processes import Load, Running, client, configure, running
from .wire import SMALL, infer, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

TENANTS = """
[tenants.acme]
granules = 1
models = ["identity", "spin"]
[tenants.globex]
granules = 1
models = ["identity"]
"""
FRONTS = {"acme": "the HTTP process of acme", "(house)": "the HTTP process of (house)", "(strangers)": "(strangers)"}


@pytest.fixture
def config(standard: Path, tmp_path: Path) -> Path:
    return configure(tmp_path / "c.toml", standard, TENANTS, watchdog='"60s"')


@pytest.fixture
def server(config: Path) -> Iterator[Running]:
    with running(config) as server:
        yield server


def stop(pid: int) -> float:
    """Have the kernel not run this process any more; returns when that was."""
    os.kill(pid, signal.SIGSTOP)
    return time.monotonic()


def state(server: Running, pid: int) -> str:
    return next((one.state for one in server.family() if one.pid == pid), "X")


@pytest.mark.parametrize("name", ["acme", "(house)", "(strangers)", "doorman"])
def test_a_process_that_is_stopped_is_replaced_and_other_tenants_notice_nothing(server: Running, name: str) -> None:
    with Load(server, **{"X-Tenant": "globex"}) as load:
        pid = server.pid(name)
        stopped = stop(pid)
        server.told("has not answered for 3.")
        until(lambda: state(server, pid) in "XZ")
        with client(server, **{"X-Tenant": "acme"}) as acme, client(server) as nobody:
            assert infer(acme, "identity", SMALL).status_code == 200
            took = time.monotonic() - stopped
            assert nobody.get("/v2/health/ready").status_code == 200
            assert nobody.get("/v2/models/identity", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert took < 15, "it takes less than 5 s where nothing else runs"
        load.more()
        assert load.wrong == []


def test_metrics_and_administration_answer_without_a_process_that_is_stopped_and_say_how_old_its_figures_are(
    server: Running,
) -> None:
    with client(server, **{"X-Tenant": "acme"}) as acme, client(server) as nobody:
        assert infer(acme, "identity", SMALL).status_code == 200
        counted = 'nv_inference_request_success{model="identity",partition="0",tenant="acme",version="1"} 1.0'
        assert counted in nobody.get("/metrics").text
        stop(server.pid("acme"))
        asked = time.monotonic()
        metrics = nobody.get("/metrics").text
        assert time.monotonic() - asked < 10
        assert counted in metrics, "what it said last is told still"
        assert _age(metrics, "acme") > 0
        assert _age(metrics, "globex") == 0
        tenants = {tenant["name"]: tenant for tenant in nobody.get("/admin/tenants").json()["tenants"]}
        assert {entry["name"] for entry in tenants["acme"]["models"]} == {"identity", "spin"}
        server.told("the HTTP process of acme has not answered for 3.")
        until(lambda: _age(nobody.get("/metrics").text, "acme") == 0)


def _age(metrics: str, tenant: str) -> float:
    line = next(line for line in metrics.splitlines() if line.startswith(f'greenlane_report_age_seconds{{tenant="{tenant}"}}'))
    return float(line.split()[-1])


def test_a_process_that_is_short_of_a_core_is_left_alone(server: Running) -> None:
    """It shares one with four that never rest, at the lowest priority: that is a slow machine."""
    pid = server.pid("acme")
    os.sched_setaffinity(pid, {cores()[0]})
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    hogs = [os.fork() for _ in range(4)]
    if 0 in hogs:
        os.sched_setaffinity(0, {cores()[0]})
        while True:
            pass
    try:
        with client(server, **{"X-Tenant": "acme"}) as acme:
            begun = time.monotonic()
            while time.monotonic() - begun < 6:
                assert infer(acme, "identity", SMALL).status_code == 200
        assert server.pid("acme") == pid
        assert not any("has not answered" in line for line in server.log)
    finally:
        for hog in hogs:
            os.kill(hog, signal.SIGKILL)
            os.waitpid(hog, 0)


def test_what_processes_are_forked_off_is_replaced_when_it_is_stopped(server: Running) -> None:
    parent = {one.parent for one in server.family() if one.name == "greenlane acme"}.pop()
    stop(parent)
    os.kill(server.pid("acme"), signal.SIGKILL)
    with client(server, **{"X-Tenant": "acme"}) as acme:
        assert infer(acme, "identity", SMALL).status_code == 200
    server.told("what processes are forked off has been stopped for 2.")
