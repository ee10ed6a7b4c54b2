"""Which GPUs' tenants have a device process each, with a fake MPS daemon that fails in each way: what is chosen and said."""

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from partitions import DeviceUnavailable
from partitions.mps import COMMAND
from server.config.schema import Config, DeviceConfig, ModelsConfig
from server.config.tables import ConfigError
from server.config.tenant import TenantConfig
from server.processes.supervision.mps_group import Identify, MpsGroup, open_groups
from tests.end_to_end.wire import until
from tests.simulation.mps import FakeMps

AUTO = DeviceConfig(backend="cuda", mps="auto")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    fake = FakeMps(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(fake.folder), prepend=os.pathsep)
    return fake


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where daemons have their folders."""
    with TemporaryDirectory(prefix="choice-", dir="/tmp") as name:
        monkeypatch.setenv("RUNTIME_DIRECTORY", name)
        yield Path(name)


def configured(tenants: int, **devices: DeviceConfig) -> Config:
    """So many tenants on each device."""
    config = Config(
        models=ModelsConfig(repository=Path("models")),
        tenants={
            f"t{number}{device}": TenantConfig(name=f"t{number}{device}", granules=1, models=("*",), device=device)
            for device in devices
            for number in range(tenants)
        },
        source="c.toml",
    )
    return config.with_devices(devices)


class Looking:
    """Processes that look at GPUs; `refused` says why one cannot, outside MPS or as a client."""

    def __init__(self, refused: Mapping[str, str]) -> None:
        self.seen: list[tuple[str, int, str]] = []
        self._refused = refused

    async def identify(self, name: str, device: DeviceConfig, environment: Mapping[str, str]) -> str:
        how = "a client" if "CUDA_MPS_PIPE_DIRECTORY" in environment else "alone"
        self.seen.append((name, device.index, how))
        if why := self._refused.get(how):
            raise DeviceUnavailable(f"device {name}: {why}")
        return "GPU-5ea1"


async def close(groups: Mapping[str, MpsGroup]) -> None:
    for each in groups.values():
        await each.close()


async def test_two_tenants_of_a_gpu_have_a_process_each_whose_daemon_runs_and_has_had_a_client(
    fake: FakeMps, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looking = Looking({})
    with caplog.at_level(logging.INFO, "greenlane.processes"):
        groups = await open_groups(configured(2, b=AUTO.model_copy(update={"index": 3})), (), looking.identify)
    assert list(groups) == ["b"]
    assert looking.seen == [("b", 3, "alone"), ("b", 0, "a client")], "a client sees its GPU alone"
    assert caplog.messages == ['device b: a device process for each of its 2 tenants, under MPS (mps = "auto")']
    assert Path((await groups["b"].environment())["CUDA_MPS_PIPE_DIRECTORY"]).parent.name in os.listdir(folder)
    await close(groups)
    assert not os.listdir(folder)


@pytest.mark.parametrize(
    ("behaviour", "refused", "tenants", "said"),
    [
        ({}, {}, 1, "it has fewer than two tenants"),
        ({}, {}, 49, "it has 49 tenants, and a daemon takes the processes of 48"),
        ({}, {"alone": "there is no driver"}, 2, "there is no driver"),
        ({}, {"a client": "this process is no client"}, 2, "this process is no client"),
        ({"start": "no room"}, {}, 2, "the MPS daemon of GPU-5ea1 ended with status 1; it printed: no room"),
        ({"start": "dies"}, {}, 2, "the MPS daemon of GPU-5ea1 ended with signal 9; it printed: "),
        ({"server": "ends"}, {}, 2, "the MPS server of GPU-5ea1 ended during its start; it printed: "),
        ({"server": "dies"}, {}, 2, "the MPS server of GPU-5ea1"),
    ],
)
async def test_a_gpu_where_that_cannot_be_has_one_process_and_the_log_says_why(
    fake: FakeMps,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    behaviour: dict[str, Any],
    refused: dict[str, str],
    tenants: int,
    said: str,
) -> None:
    fake.behave(**behaviour)
    with caplog.at_level(logging.INFO, "greenlane.processes"):
        assert await open_groups(configured(tenants, **{"0": AUTO}), (), Looking(refused).identify) == {}
    *first, line = (each for each in caplog.records if each.name == "greenlane.processes")
    assert [each.message.startswith(f"device 0: {said}") for each in first] == [True] * bool(behaviour), "it was tried twice"
    assert line.message.startswith(f'device 0: one device process for all tenants (mps = "auto"): {said}'), line.message
    assert line.levelname == ("INFO" if tenants < 2 else "WARNING")
    assert not os.listdir(folder), "no daemon is left"


async def test_tenants_that_borrow_and_lend_have_a_process_each(fake: FakeMps) -> None:
    config = configured(2, **{"0": AUTO})
    tenants = {
        name: each.model_copy(update={"burst": 2} if name == "t10" else {"lend": 0.001})
        for name, each in config.tenants.items()
    }
    groups = await open_groups(config.model_copy(update={"tenants": tenants}), (), Looking({}).identify)
    await close(groups)
    assert list(groups) == ["0"]


async def test_without_nvidia_s_command_the_gpu_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    looking = Looking({})
    assert await open_groups(configured(2, **{"0": AUTO}), (), looking.identify) == {}
    assert caplog.messages[0].startswith(
        f'device 0: one device process for all tenants (mps = "auto"): {COMMAND} is not on PATH; '
    )
    assert looking.seen == []


async def test_beside_a_daemon_of_the_operator_s_tenants_share_a_process(
    fake: FakeMps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    others = await open_groups(configured(2, **{"0": AUTO}), (), Looking({}).identify)
    pipes = (await others["0"].environment())["CUDA_MPS_PIPE_DIRECTORY"]
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", pipes)
    assert await open_groups(configured(2, **{"0": AUTO}), (), Looking({}).identify) == {}
    assert (
        f'device 0: one device process for all tenants (mps = "auto"): an MPS daemon of yours runs in {pipes}'
        in caplog.messages[-1]
    )
    await close(others)


async def test_each_gpu_has_its_own_choice_and_on_is_not_tried_before_its_processes_start(
    fake: FakeMps, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = {"auto": AUTO, "on": DeviceConfig(backend="cuda", mps="on"), "off": DeviceConfig(backend="cuda", mps="off")}
    groups = await open_groups(configured(2, **devices), (), Looking({"alone": "it is busy"}).identify)
    assert list(groups) == ["on"]
    assert len(caplog.records) == 1
    assert not os.listdir(folder)


async def test_cores_are_left_out_without_a_word_and_refused_where_each_tenant_is_to_have_a_process(
    fake: FakeMps, caplog: pytest.LogCaptureFixture
) -> None:
    looking = Looking({})
    with caplog.at_level(logging.INFO):
        assert await open_groups(configured(2, **{"0": DeviceConfig(mps="auto")}), ("0",), looking.identify) == {}
    assert (caplog.records, looking.seen) == ([], [])
    with pytest.raises(ConfigError, match=r'^c\.toml: device 0 is cores of this host: mps = "on" is for GPUs; leave it out$'):
        await open_groups(configured(2, **{"0": DeviceConfig(mps="on")}), ("0",), looking.identify)


@pytest.mark.parametrize("waits", ["daemon", "client"])
async def test_given_up_meanwhile_it_leaves_no_daemon(fake: FakeMps, folder: Path, waits: str) -> None:
    reached = asyncio.Event()

    async def look(name: str, device: DeviceConfig, environment: Mapping[str, str]) -> str:
        if environment:
            reached.set()
            await asyncio.Event().wait()
        return f"GPU-{name}"

    identify: Identify = look
    if waits == "daemon":
        fake.behave(start="silent")
    opening = asyncio.create_task(open_groups(configured(2, a=AUTO, b=AUTO), (), identify))
    if waits == "daemon":
        await asyncio.to_thread(until, lambda: len(os.listdir(folder)) == 2)
    else:
        await reached.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not os.listdir(folder)
