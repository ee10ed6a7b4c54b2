"""Builds of a whole server: the real builder in a child process, for a simulated GPU."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.watched_server import alive
from engines.errors import ModelRefused
from engines.tensorrt.api import find_tensorrt
from tests.gpu.networks import resnet

from .harness import cores
from .processes import Running, configure, running_script, tenant
from .wire import client, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

SERVER = """
import sys
from contextlib import ExitStack
from engines.tensorrt.api import find_tensorrt
from server import __main__ as command
from server.app import open_configured
from server.host.leaving import leave
from tests.simulation import Gpu, installed
from tests.simulation.building import building
from tests.simulation.tensorrt import library

simulation = ExitStack()

def opener(config):
    gpu = Gpu()
    simulation.enter_context(installed(gpu, library(gpu, **building(gpu, find_tensorrt(["tensorrt_rtx"]).module))))
    return open_configured(config)

if __name__ == "__main__":
    command.open_configured = opener
    leave(command.main(["--config", sys.argv[1]]))
"""
"""The device process has the simulation."""
TENANTS = "".join(tenant(name, "slow", memory="32MiB") for name in ("acme", "globex"))


class Building(Running):
    """A server that begins to build."""

    def hold(self) -> int:
        """Stop the builder, so that it never ends, and return its process."""
        (pid,) = (int(found[1]) for line in self.log if (found := re.search(r"building it in process (\d+)", line)))
        os.kill(pid, signal.SIGSTOP)
        return pid


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    try:
        find_tensorrt(["tensorrt_rtx"])
    except ModelRefused as refusal:
        pytest.skip(str(refusal))
    path = tmp_path / "models" / "slow" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(resnet().onnx)  # Its build takes a while, so that it can be stopped.
    return tmp_path / "models"


@contextmanager
def building(folder: Path, config: Path) -> Iterator[Building]:
    with running_script(folder, SERVER, config, kind=Building, signs=["building it in process "]) as server:
        yield server


def configured(folder: Path, repository: Path, models: str = "") -> Path:
    return configure(folder / "c.toml", repository, f"{models}\n{TENANTS}\n[device]\nbackend = 'cuda'\nindex = 1")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_during_a_build_leaves_no_child(tmp_path: Path, repository: Path, number: signal.Signals) -> None:
    with building(tmp_path, configured(tmp_path, repository)) as server:
        builder = server.hold()
        until(lambda: any(one.pid == builder for one in server.family()))
        family = server.family()
        server.signal(number)
        assert server.wait(20) == (0 if number == signal.SIGTERM else -number)
        until(lambda: not alive(family))
        assert not [line for line in server.log if "Traceback" in line]


def test_a_build_that_times_out_makes_only_its_model_unavailable(tmp_path: Path, repository: Path) -> None:
    """Both tenants' indexes have the reason after one build: the server does not try once for each."""
    with building(tmp_path, configured(tmp_path, repository, 'build_timeout = "3s"')) as server:
        server.hold()
        server.wait_for_log("listening on ")
        server.wait_for_log("ready: ")
        server.wait_for_log("model slow 1 is unavailable: slow/1/model.onnx: the build took more than 3 s and was killed")
        assert sum("building it in process" in line for line in server.log) == 1
        found = re.search(r"listening on http://\S+?:(\d+)", "".join(server.log))
        assert found
        server.port = int(found[1])
        for tenant in ("acme", "globex"):
            with client(server, **{"X-Tenant": tenant}) as http:
                assert http.get("/v2/health/live").status_code == 200
                assert http.get("/v2/health/ready").status_code == 503, "it is served no model"
                (entry,) = http.post("/v2/repository/index").json()
                assert entry["state"] == "UNAVAILABLE"
                assert "allow it more (models.build_timeout)" in entry["reason"]
                assert str(tmp_path) not in entry["reason"], "the path of the repository must not be revealed"


def test_a_builder_that_crashes_makes_only_its_model_unavailable(tmp_path: Path, repository: Path) -> None:
    with building(tmp_path, configured(tmp_path, repository)) as server:
        builder = server.hold()
        for number in (signal.SIGSEGV, signal.SIGCONT):
            os.kill(builder, number)
        server.wait_for_log("model slow 1 is unavailable: slow/1/model.onnx: the build was killed by signal 11 (SIGSEGV)")
        server.wait_for_log("ready: ")
        assert server.popen.poll() is None
