"""The reading of a GPU on a simulated `cuda.core.system`, and that simulation against the real package."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partitions.cuda import health
from partitions.health import Health, from_line, to_line
from tests.simulation import Gpu, installed
from tests.simulation import system as simulated

ADDRESS = "0000:4e:00.0"
ALL = {
    "uuid": "GPU-1",
    "busy": 50,
    "memory_busy": 25,
    "total": 80 * 2**30,
    "used": 2**30,
    "temperature": 61,
    "reasons": ["sw_power_cap", "gpu_idle"],
    "sm": 1980,
    "events": True,
    "DEV_POWER_INSTANT": 350_500,
    "DEV_POWER_AVERAGE": 340_000,
    "DEV_POWER_CURRENT_LIMIT": 700_000,
    "DEV_TOTAL_ENERGY_CONSUMPTION": 9_000_000,
    "DEV_ECC_DBE_VOL_TOTAL": 2,
}
typing = pytest.importorskip("cuda.core.system.typing", reason="needs the cuda extra")


@pytest.fixture
def system() -> Any:
    """The simulation, with the real package's names of reasons and events."""
    names = SimpleNamespace(FieldId=simulated.FieldId, EventType=typing.EventType, ClocksEventReasons=typing.ClocksEventReasons)
    public = {name: value for name, value in vars(simulated).items() if not name.startswith("_")}
    return SimpleNamespace(**{**public, "typing": names})


@pytest.fixture
def state() -> dict[str, Any]:
    """What the device says of itself."""
    return {**ALL}


@pytest.fixture
def device(state: dict[str, Any]) -> simulated.Device:
    return simulated.Device(pci_bus_id=ADDRESS, state=state)


def test_a_reading_is_in_base_units(system: Any, device: simulated.Device) -> None:
    found = health.read(system, device, {"31": 1})
    assert (found.uuid, found.utilization, found.memory_utilization) == ("GPU-1", 0.5, 0.25)
    assert (found.memory_total, found.memory_used, found.temperature) == (80 * 2**30, 2**30, 61)
    assert (found.power, found.power_limit, found.energy) == (350.5, 700.0, 9000.0)
    assert found.clocks == {"sm": 1.98e9}, "the clock of memory is not supported here"
    assert {name for name, holds in found.throttled.items() if holds} == {"sw_power_cap"}
    assert found.throttled["hw_slowdown"] is False
    assert not {"gpu_idle", "none"} & set(found.throttled), "an idle GPU is not throttled"
    assert (found.ecc, found.xids, found.lost) == ({"uncorrected": 2}, {"31": 1}, False)


def test_what_a_gpu_moved_is_in_a_reading_unless_it_is_lost(
    system: Any, device: simulated.Device, state: dict[str, Any]
) -> None:
    gpu = Gpu()
    with installed(gpu) as cuda:
        traffic = cuda.open_nvml(ADDRESS).traffic(lambda: gpu.seconds)
        gpu.seconds, gpu.moved = 2.0, (3e12, 2e9, 1e9)
        found = health.read(system, device, {}, traffic)
        assert found.moved == {"memory": 3 * 10**12, "pcie_in": 2 * 10**9, "pcie_out": 10**9}
        assert found.memory_bandwidth == 3_352_320_000_000
        assert from_line(to_line(ADDRESS, found)) == (ADDRESS, found)
        state["lost"] = True
        assert health.read(system, device, {}, traffic).moved == {}


def test_a_value_of_zero_is_reported(system: Any, device: simulated.Device, state: dict[str, Any]) -> None:
    state |= {"busy": 0, "DEV_POWER_INSTANT": 0, "DEV_ECC_DBE_VOL_TOTAL": 0}
    found = health.read(system, device, {})
    assert (found.utilization, found.power, found.ecc) == (0.0, 0.0, {"uncorrected": 0})


def test_power_is_the_average_where_there_is_no_other(system: Any, device: simulated.Device, state: dict[str, Any]) -> None:
    del state["DEV_POWER_INSTANT"]
    assert health.read(system, device, {}).power == 340.0


def test_a_gpu_that_supports_nothing_has_an_empty_reading(system: Any) -> None:
    assert health.read(system, simulated.Device(pci_bus_id=ADDRESS), {}) == Health()


def test_a_gpu_that_is_lost_is_said_to_be(system: Any, device: simulated.Device, state: dict[str, Any]) -> None:
    state["lost"] = True
    assert health.read(system, device, {"79": 1}) == Health(lost=True, xids={"79": 1})


def test_errors_of_the_driver_are_counted_by_number(
    system: Any, device: simulated.Device, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "INTERVAL", 60.0)
    state["xids"] = [31, 79, 31]
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            raise BrokenPipeError

    health.watch(system, ADDRESS, device, write)
    (address, before), (_, after) = map(from_line, lines)
    assert (address, before.xids, after.xids) == (ADDRESS, {}, {"31": 2, "79": 1})
    assert after.power == 350.5


def test_what_a_gpu_moved_is_read_where_bindings_are_too_old_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "INTERVAL", 0.3)
    gpu, lines = Gpu(), list[str]()

    def write(line: str) -> None:
        lines.append(line)
        gpu.moved, gpu.seconds = (3e11, 2e9, 1e9), 1.0
        if len(lines) == 2:
            raise BrokenPipeError

    with installed(gpu) as cuda:
        monkeypatch.setattr(health, "open_nvml", cuda.open_nvml)
        health.watch(None, ADDRESS, None, write, health.NEEDS)
    (_, found), (_, later) = map(from_line, lines)
    assert (found.missing, found.memory_bandwidth) == (health.NEEDS, 3_352_320_000_000)
    assert set(later.moved) == {"memory", "pcie_in", "pcie_out"}
    assert (found.utilization, found.temperature, found.lost) == (None, None, False)


def test_a_gpu_that_cannot_be_opened_is_not_read_as_one_that_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process is started again after one of several GPUs was lost."""

    def refuse(pci_bus_id: str) -> None:
        raise simulated.GpuIsLostError("GPU is lost")

    system = SimpleNamespace(CUDA_BINDINGS_NVML_IS_COMPATIBLE=True, Device=refuse)
    monkeypatch.setitem(sys.modules, "cuda.core.system", system)
    with installed(Gpu()) as cuda:
        monkeypatch.setattr(health, "open_nvml", cuda.open_nvml)
        with pytest.raises(SystemExit, match=r"the health of GPUs cannot be read: GPU is lost"):
            health.main([ADDRESS])


def test_without_a_driver_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="the health of GPUs cannot be read: "):
        health.main([ADDRESS])
    assert capsys.readouterr().out == ""


def documented(module: str) -> dict[str, set[str]]:
    """The classes of a module of cuda.core.system with their members, by its stub: it exists where NVML's bindings do not."""
    folder = Path(sys.modules["cuda.core.system.typing"].__file__ or "").parent
    tree = ast.parse((folder / module).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {each.name: {item.name for item in each.body if isinstance(item, ast.FunctionDef)} for each in classes}


def test_the_simulation_has_only_what_is_documented() -> None:
    theirs = documented("_device.pyi")
    for ours in (simulated.Device, simulated.DeviceEvents, simulated.FieldValue):
        assert {name for name in vars(ours) if not name.startswith("_")} <= theirs[ours.__name__], ours
    assert {"get_sensor"} <= theirs["Temperature"]
    assert {"gpu", "memory"} <= theirs["Utilization"]
    assert {"total", "used"} <= theirs["MemoryInfo"]
    assert {"get_current_mhz"} <= theirs["ClockInfo"]
    assert {"event_data"} <= theirs["EventData"]
    errors = (Path(sys.modules["cuda.core.system.typing"].__file__ or "").parent / "exceptions.py").read_text()
    assert all(
        f"{name} = nvml.{name}" in errors for name in ("NvmlError", "NotSupportedError", "GpuIsLostError", "TimeoutError")
    )
