"""Readings of devices by a process that lies, ends and comes back, and of cores."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from partitions.health import Health, to_line
from server.accounts.usage import Moved
from server.control.controlled_device import ControlledDevice
from server.control.descriptions import DeviceInfo
from server.observing.health import HealthMonitor

ADDRESS = "0000:4e:00.0"
WAITS = "\nimport sys; sys.stdout.flush(); sys.stdin.read()"


def gpu() -> ControlledDevice:
    return ControlledDevice("0", {}, info=DeviceInfo("cuda", "", "SM", (8,), ADDRESS))


@asynccontextmanager
async def watching(code: str, tmp_path: Path = Path("/")) -> AsyncIterator[HealthMonitor]:
    def make(addresses: Sequence[str]) -> list[str]:
        assert addresses == [ADDRESS]
        return [sys.executable, "-c", code]

    monitor = HealthMonitor([gpu()], make, tmp_path)
    monitor.start()
    try:
        yield monitor
    finally:
        await monitor.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_last_reading_counts_and_energy_counts_from_the_first() -> None:
    lines = [to_line(ADDRESS, Health(utilization=0.1, energy=100.0)), "what\n", to_line("other", Health())]
    lines.append(to_line(ADDRESS, Health(utilization=0.7, energy=130.5)))
    async with watching(f"print({''.join(lines)!r}, end='')" + WAITS) as monitor:
        assert monitor.reading("0") is None
        await until(lambda: (found := monitor.reading("0")) and found[0].utilization == 0.7)
        assert monitor.energy("0") == 30.5
        found = monitor.reading("0")
        assert found
        assert 0 <= found[1] < 10


async def test_a_line_of_another_version_does_not_end_the_readings() -> None:
    """As after an update of the sources below a server that runs on."""
    lines = [to_line(ADDRESS, Health(moved={"nvlink": 7})), f'{{"address": "{ADDRESS}", "moved": {{"memory": NaN}}}}\n']
    lines.append(to_line(ADDRESS, Health(moved={"memory": 9, "nvlink": 7})))
    async with watching(f"print({''.join(lines)!r}, end='')" + WAITS) as monitor:
        await until(lambda: (found := monitor.reading("0")) and "memory" in found[0].moved)


def test_what_a_gpu_moves_is_what_the_last_two_readings_are_apart() -> None:
    clock, said = [0.0], list[tuple[str, Moved]]()
    monitor = HealthMonitor([gpu()], clock=lambda: clock[0], moved=lambda *each: said.append(each))
    assert monitor.moving("0") == {}
    for now, moved, rates in (
        (2.0, {}, {}),
        (4.0, {"memory": 10}, {}),
        (6.0, {"memory": 40, "pcie_in": 4}, {"memory": 15.0}),
        (8.0, {"memory": 40, "pcie_in": 14}, {"memory": 0.0, "pcie_in": 5.0}),
        (10.0, {"memory": 7, "pcie_in": 20}, {"pcie_in": 3.0}),  # Another process counts from 0 again.
        (12.0, {}, {}),  # And another one, which has not counted anything yet.
        (14.0, {}, {}),
        (16.0, {"memory": 9}, {}),
    ):
        clock[0] = now
        monitor.take(ADDRESS, "0", Health(moved=moved))
        assert monitor.moving("0") == rates
    clock[0] = 18.0
    monitor.take(ADDRESS, "0", Health(moved={"memory": 11}))
    assert monitor.moving("0") == {"memory": 1.0}
    clock[0] = 40.0
    assert monitor.moving("0") == {}, "it has said nothing for long"
    monitor.take(ADDRESS, "0", Health(lost=True))
    meters = Moved(10), Moved(40, 4), Moved(40, 14), Moved(7, 20), Moved(), Moved(9), Moved(11)
    assert said == [("0", meter) for meter in meters]


async def test_a_process_that_reads_nothing_is_not_started_again(caplog: pytest.LogCaptureFixture) -> None:
    async with watching("import sys; sys.exit('there is no driver')") as monitor:
        await until(lambda: "there is no driver" in caplog.text)
        assert monitor.reading("0") is None
    assert caplog.text.count("are not among the metrics") == 1


async def test_a_process_that_cannot_be_started_is_said_and_keeps_nothing_from_ending(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monitor = HealthMonitor([gpu()], lambda _: [str(tmp_path / "none")], tmp_path)
    monitor.start()
    await until(lambda: "are not among the metrics: [Errno 2] No such file or directory" in caplog.text)
    await monitor.close()


async def test_what_readings_need_to_be_whole_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        to_line(ADDRESS, Health(moved={"memory": count, "pcie_in": 0, "pcie_out": 0}, missing="it is old")) for count in (1, 2)
    ]
    async with watching(f"print({''.join(lines)!r}, end='')" + WAITS) as monitor:
        await until(lambda: (found := monitor.reading("0")) and found[0].moved["memory"] == 2)
    said = [each.message for each in caplog.records if "it is old" in each.message]
    assert said == ["device 0: of the GPU's state only what it moves and takes is read: it is old"]


async def test_a_process_that_ends_is_started_again_and_a_loss_and_an_error_are_logged(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    line, later = to_line(ADDRESS, Health(xids={"79": 1})), to_line(ADDRESS, Health(xids={"79": 1}, lost=True))
    (tmp_path / "proc").mkdir()
    code = f"""import os, sys
if os.path.exists("{tmp_path}/once"):
    print({later!r}, end="")
else:
    open("{tmp_path}/once", "w").close()
    print({line!r}, end="")
    sys.exit()"""
    async with watching(code + WAITS, tmp_path) as monitor:
        await until(lambda: (found := monitor.reading("0")) and found[0].lost)
    assert caplog.text.count("the driver reports XID 79") == 1, "it was counted before"
    assert caplog.text.count("it is lost") == 1


async def test_cores_are_as_busy_as_they_were_between_two_looks(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    stat = tmp_path / "proc/stat"
    stat.write_text("cpu0 100 0 0 900 0 0 0 0 0 0\ncpu1 0 0 0 1000 0 0 0 0 0 0\n")
    monitor = HealthMonitor([], root=tmp_path)
    assert monitor.busy([0]) is None
    monitor.start()
    try:
        await until(lambda: monitor.cores)
        stat.write_text("cpu0 175 0 0 925 0 0 0 0 0 0\ncpu1 0 0 0 1100 0 0 0 0 0 0\n")
        await until(lambda: monitor.busy([0]) is not None)
        assert (monitor.busy([0]), monitor.busy([1]), monitor.busy([0, 1]), monitor.busy([7])) == (0.75, 0.0, 0.375, None)
    finally:
        await monitor.close()
