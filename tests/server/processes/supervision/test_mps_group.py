"""The processes of one GPU under a fake MPS daemon: when they start, when all have to end, and what stands in the way."""

import asyncio
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from partitions import Device, DeviceUnavailable, PartitionError
from partitions.errors import MpsError
from partitions.mps import COMMAND
from server.config.schema import DeviceConfig
from server.config.server import ServerConfig
from server.processes.device_side.identify import identify
from server.processes.supervision.mps_group import MpsGroup, memory_limit
from tests.fakes import FakeDevice
from tests.partitions.test_mps import no_descriptors
from tests.simulation.mps import FakeMps

PATIENCE = 20.0


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    fake = FakeMps(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(fake.folder), prepend=os.pathsep)
    return fake


def daemon_of(environment: Mapping[str, str]) -> int:
    return int(Path(environment["CUDA_MPS_PIPE_DIRECTORY"], f"{COMMAND}.pid").read_text())


def is_there(environment: Mapping[str, str]) -> bool:
    return Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()


async def uuid() -> str:
    return "GPU-5ea1"


def test_a_client_has_twice_its_tenant_s_budget_and_room_for_the_process_itself() -> None:
    assert memory_limit(None) == {}
    assert memory_limit(20 << 30) == {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=41984M"}


async def test_the_daemon_is_started_once_for_all_processes_and_ended_with_the_group(fake: FakeMps) -> None:
    group = MpsGroup("0", uuid)
    one, other = await asyncio.gather(group.environment(), group.environment())
    assert one == other
    assert one["CUDA_VISIBLE_DEVICES"] == "GPU-5ea1"
    folder = Path(one["CUDA_MPS_PIPE_DIRECTORY"]).parent
    assert folder.exists()
    await group.close()
    await group.close()
    assert not folder.exists()


async def test_all_processes_end_with_the_daemon_and_start_by_the_next_one(fake: FakeMps) -> None:
    group, ended = MpsGroup("0", uuid), asyncio.Event()
    before = await group.environment()
    keeping = asyncio.create_task(group.keep(lambda _: ended.set()))
    os.kill(daemon_of(before), signal.SIGKILL)
    await asyncio.wait_for(ended.wait(), PATIENCE)
    after = await asyncio.wait_for(group.environment(), PATIENCE)
    assert after["CUDA_MPS_PIPE_DIRECTORY"] != before["CUDA_MPS_PIPE_DIRECTORY"]
    keeping.cancel()
    await group.close()


@pytest.mark.parametrize("which", ["daemon", "server"])
async def test_a_daemon_that_ends_before_it_has_had_a_process_is_started_again_for_the_first(fake: FakeMps, which: str) -> None:
    """One that was chosen waits for those of other GPUs to be. A process that finds none refuses to start."""
    group = MpsGroup("0", uuid)
    before = await group.environment()
    server = re.search(r"server (\d+)", repr(group))
    assert server
    os.kill(daemon_of(before) if which == "daemon" else int(server[1]), signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        while (after := await group.environment()) == before:
            await asyncio.sleep(0.001)
    assert is_there(after)
    assert not is_there(before)
    await group.close()


class Once(logging.Handler):
    """Calls a function when the first line with this text is logged."""

    def __init__(self, text: str, call: Callable[[], None]) -> None:
        super().__init__()
        self._text = text
        self._call = call

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            logging.getLogger("greenlane").removeHandler(self)
            self._call()


@pytest.mark.parametrize("mended", [True, False])
async def test_the_first_daemon_is_tried_twice_in_another_folder(
    fake: FakeMps, caplog: pytest.LogCaptureFixture, mended: bool
) -> None:
    """As nothing is served yet, and the start would fail; later each process is tried again and again anyway."""
    fake.behave(server="ends")
    group = MpsGroup("0", uuid)
    logging.getLogger("greenlane").addHandler(Once("starting it a second time", fake.behave if mended else list))
    if mended:
        assert is_there(await group.environment())
    else:
        with pytest.raises(MpsError, match="the MPS server of GPU-5ea1 ended during its start"):
            await group.environment()
    await group.close()
    again = [record.getMessage() for record in caplog.records if "starting it a second time" in record.getMessage()]
    assert len(again) == 1
    assert again[0].startswith("device 0: the MPS server of GPU-5ea1 ended during its start; it printed: ")
    fake.behave(server="ends")
    with pytest.raises(MpsError):
        await group.environment()
    assert len([record for record in caplog.records if "starting it a second time" in record.getMessage()]) == 1


async def test_a_daemon_that_takes_no_more_clients_is_found_by_the_next_process_and_all_start_by_another(
    fake: FakeMps, caplog: pytest.LogCaptureFixture
) -> None:
    """Or that one would never be served, as the daemon has not ended."""
    group, ended = MpsGroup("0", uuid), asyncio.Event()
    before = await group.environment()
    keeping = asyncio.create_task(group.keep(lambda _: ended.set()))
    await asyncio.sleep(0)
    assert await group.environment() == before
    shutil.rmtree(Path(before["CUDA_MPS_PIPE_DIRECTORY"]).parent)
    with pytest.raises(MpsError, match="Cannot find MPS control daemon process"):
        await group.environment(coming=True)
    assert not ended.is_set(), "others are served on while one only comes"
    after = await asyncio.wait_for(group.environment(), PATIENCE)
    assert ended.is_set()
    assert is_there(after)
    assert [record.getMessage() for record in caplog.records if "takes no more clients" in record.getMessage()]
    ended.clear()
    os.kill(daemon_of(after), signal.SIGKILL)
    await asyncio.wait_for(ended.wait(), PATIENCE)
    keeping.cancel()
    await group.close()


async def test_processes_share_a_deposit_until_all_of_them_end(fake: FakeMps) -> None:
    """What they shared may have been lost with the GPU; processes that end by themselves find it again."""
    group, ended = MpsGroup("0", uuid), asyncio.Event()
    before = await group.environment()
    first = group.deposit
    await group.environment()
    assert group.deposit is first
    keeping = asyncio.create_task(group.keep(lambda _: ended.set()))
    os.kill(daemon_of(before), signal.SIGKILL)
    await asyncio.wait_for(ended.wait(), PATIENCE)
    second = group.deposit
    assert second is not first
    assert -1 in first.descriptors, "closed"
    keeping.cancel()
    await group.close()
    assert -1 in second.descriptors


async def test_a_group_that_was_closed_has_another_daemon_for_its_next_process_and_keeps_that_one(fake: FakeMps) -> None:
    identified, ended = list[str](), asyncio.Event()

    async def identify() -> str:
        identified.append("0")
        return "GPU-5ea1"

    group = MpsGroup("0", identify)
    before = await group.environment()
    keeping = asyncio.create_task(group.keep(lambda _: ended.set()))
    _, after = await asyncio.gather(group.close(), group.environment())
    assert not is_there(before)
    assert not ended.is_set()
    os.kill(daemon_of(after), signal.SIGKILL)
    await asyncio.wait_for(ended.wait(), PATIENCE)
    await asyncio.wait_for(group.environment(), PATIENCE)
    assert identified == ["0"]
    keeping.cancel()
    await group.close()


async def test_the_end_of_a_daemon_that_is_closed_meanwhile_ends_no_process_and_starts_no_daemon(fake: FakeMps) -> None:
    group, ended = MpsGroup("0", uuid), asyncio.Event()
    environment = await group.environment()
    keeping = asyncio.create_task(group.keep(lambda _: ended.set()))
    os.kill(daemon_of(environment), signal.SIGKILL)
    await group.close()
    assert not is_there(environment)
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
    assert not ended.is_set()
    assert "server" not in repr(group)


async def test_a_daemon_of_the_operator_s_is_refused_with_its_folder(fake: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    other = MpsGroup("0", uuid)
    pipes = (await other.environment())["CUDA_MPS_PIPE_DIRECTORY"]
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", pipes)
    with pytest.raises(DeviceUnavailable, match=f'^device 1: an MPS daemon of yours runs in {pipes}, .* or set mps = "off"$'):
        await MpsGroup("1", uuid).environment()
    await other.close()


async def test_without_nvidia_s_command_it_is_said_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PartitionError, match=f'^device 0: {COMMAND} is not on PATH; .* or set mps = "off"$'):
        await MpsGroup("0", uuid).environment()


class Gpu(FakeDevice):
    uuid = "GPU-5ea1"


def good(_: DeviceConfig) -> Device:
    return Gpu()


def without_uuid(_: DeviceConfig) -> Device:
    return FakeDevice()


def absent(_: DeviceConfig) -> Device:
    raise DeviceUnavailable("there is no driver")


def overlapping(_: DeviceConfig) -> Device:
    device = Gpu((1, 1))
    device.lie = lambda _: frozenset({1})
    return device


def crashing(config: DeviceConfig) -> Device:
    assert config.mps == "off"
    assert not [name for name in os.environ if name.startswith("CUDA_MPS_")]
    os._exit(1)


def described(_: DeviceConfig) -> Device:
    ignored = [each.name for each in signal.valid_signals() if isinstance(each, signal.Signals) and is_ignored(each)]
    level = logging.getLevelName(logging.getLogger("greenlane").level)
    raise DeviceUnavailable(f"{Path('/proc/self/comm').read_text().strip()}, {level}, {sorted(ignored)}")


def is_ignored(number: signal.Signals) -> bool:
    return number not in (signal.SIGPIPE, signal.SIGXFSZ) and signal.getsignal(number) == signal.SIG_IGN


async def test_the_gpu_is_identified_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")
    assert await identify("0", ServerConfig(), DeviceConfig(mps="on"), good) == "GPU-5ea1"


async def test_the_process_that_identifies_a_gpu_has_name_log_and_signals_as_others_have() -> None:
    with pytest.raises(DeviceUnavailable, match=r"greenlane gpu 0, ERROR, \['SIGHUP', 'SIGINT', 'SIGTERM'\]$"):
        await identify("0", ServerConfig(log_level="error"), DeviceConfig(mps="on"), described)


@pytest.mark.parametrize(
    ("opener", "said"),
    [
        (without_uuid, "^device 0: mps is for GPUs, and this is a fake, 4 granules; leave it out$"),
        (absent, "^device 0: there is no driver$"),
        (overlapping, "^device 0: granule 0 and granule 1 both ran on 1$"),
        (crashing, "^device 0: the process that looks at it has ended, or hangs; the log may say why$"),
    ],
)
async def test_a_gpu_that_cannot_be_used_is_refused(opener: Callable[[DeviceConfig], Device], said: str) -> None:
    with pytest.raises(PartitionError, match=said):
        await identify("0", ServerConfig(), DeviceConfig(mps="on"), opener)


async def test_where_no_process_can_look_at_a_gpu_that_is_what_is_said() -> None:
    """With mps = "auto" tenants share a process then."""
    said = r"^device 0: no process that looks at it can be started: .*Too many open files"
    with no_descriptors(), pytest.raises(PartitionError, match=said):
        await identify("0", ServerConfig(), DeviceConfig(mps="on"), good)
