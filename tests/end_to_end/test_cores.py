"""On which of the host's cores a server's processes run, as the kernel reports it, on devices with and without cores."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .harness import cores
from .processes import Running, configure, running_script, tenant, threads
from .wire import until

SCRIPT = """
import asyncio, sys
from pathlib import Path
from server.host import logs
from server.config.file import load
from server.processes.serve import serve
from server.processes.supervision.listen import listen
from tests.fakes import FakeDevice

def without_cores(config):
    return FakeDevice()

def with_cores(config):
    device = FakeDevice()
    device.on_host_cores = True
    return device

if __name__ == "__main__":
    config = load(Path(sys.argv[1]))
    logs.configure(config.server.log_format, config.server.log_level)
    cores = [int(core) for core in sys.argv[2:]]
    opener = without_cores if cores else with_cores
    asyncio.run(serve(config, opener, *listen(config.server.host, config.server.port, {}), cores=lambda _: cores))
"""
"""A server on a device without cores of its own, which may use these of the host's; without any, on one that has some."""


@contextmanager
def serving(folder: Path, models: Path, allowed: list[int], tenants: str = tenant(), **settings: str) -> Iterator[Running]:
    """Run such a server inside the block."""
    config = configure(folder / "c.toml", models, tenants, **settings)
    with running_script(folder, SCRIPT, config, *allowed, kind=Running) as server:
        yield server
        server.signal()
        assert server.wait() == 0


def places(server: Running, *names: str) -> list[set[int]]:
    """The affinity of the first threads of these processes."""
    return [os.sched_getaffinity(server.pid(name)) for name in names]


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An empty repository."""
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.mark.skipif(len(cores()) < 2, reason="two processes apart need two cores")
def test_http_and_device_processes_have_separate_cores_also_after_a_restart(empty: Path, tmp_path: Path) -> None:
    first, second = cores()[:2]
    with serving(tmp_path, empty, [first, second]) as server:
        server.wait_for_log(
            f"HTTP process of acme on core {second}; device process on core {first}, all others on core {first}"
        )
        everyone = ("acme", "(shared)", "(unauthenticated)", "(dispatcher)", "dev 0")
        expected = [{second}, {first}, {first}, {first}, {first}]
        until(lambda: places(server, *everyone) == expected)  # A tenant's process sets it when the message arrives.
        assert threads(server.popen.pid) == threads(server.pid("dev 0")) == {frozenset({first})}
        server.kill(*everyone)
        server.wait_for_log("starting another", 5)
        until(lambda: places(server, *everyone) == expected)


def test_with_too_few_cores_or_front_cores_any_processes_run_on_all_cores(empty: Path, tmp_path: Path) -> None:
    for settings, said in (({}, "HTTP on any core: too few"), ({"front_cores": '"any"', "log_level": '"debug"'}, None)):
        with serving(tmp_path, empty, cores()[:1], **settings) as server:
            assert places(server, "acme", "(shared)", "(dispatcher)") == [set(cores())] * 3
            assert threads(server.popen.pid) == threads(server.pid("dev 0")) == {frozenset(cores())}
            if said:
                server.wait_for_log(said)
            else:
                assert not [line for line in server.log if re.search(r"HTTP .*on", line)]


def test_front_cores_on_another_tenants_partition_are_a_warning_at_startup(empty: Path, tmp_path: Path) -> None:
    with serving(tmp_path, empty, [], tenant() + tenant("globex", front_cores="0")) as server:
        server.wait_for_log("tenants.globex.front_cores: 0 is of acme's partition, whose work this tenant's HTTP would delay")
        assert any("WARNING greenlane.processes: tenants.globex.front_cores" in line for line in server.log)
