"""Metrics of a GPU's readings: Triton's names, labels and units."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from partitions.health import CoreTime, Health
from server.admin import metrics
from server.control.controlled_device import ControlledDevice
from server.control.controller import Controller
from server.control.descriptions import DeviceInfo, PartitionInfo
from server.observing.health import HealthMonitor

FULL = Health(
    uuid="GPU-1",
    utilization=0.5,
    memory_total=1000,
    memory_used=400,
    power=350.5,
    power_limit=700.0,
    energy=130.5,
    temperature=61,
    clocks={"sm": 1.98e9},
    throttled={"sw_power_cap": True, "hw_slowdown": False},
    ecc={"uncorrected": 2},
    xids={"79": 1},
    moved={"memory": 3 * 10**12, "pcie_in": 5},
    memory_bandwidth=3_352_320_000_000,
)


def written(*devices: ControlledDevice, readings: dict[str, Health], cores: Any = ({}, {})) -> list[str]:
    """The lines without comments, for these readings of two seconds ago."""
    clock = [10.0]
    monitor = HealthMonitor(devices, root=Path("/nowhere"), clock=lambda: clock[0])
    for name, health in readings.items():
        for each in (Health(energy=100.0), health):
            monitor.take(f"0000:4e:00.{name}", name, each)
    for each in cores:
        monitor.take_cores(each)
    clock[0] = 12.0
    controller = cast(Controller, SimpleNamespace(devices=devices))

    class Only(Collector):
        def collect(self) -> Any:
            return metrics.health(controller, monitor)

    registry = CollectorRegistry()
    registry.register(Only())
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith(("#", "nv_cpu_"))]


def gpu(name: str) -> ControlledDevice:
    return ControlledDevice(name, {}, info=DeviceInfo("cuda", "", "SM", (8, 8), f"0000:4e:00.{name}"))


def test_a_gpu_has_tritons_metrics_and_ours() -> None:
    labels = '{device="0",gpu_uuid="GPU-1"}'
    assert set(written(gpu("0"), gpu("1"), readings={"0": FULL})) == {
        f"nv_gpu_utilization{labels} 0.5",
        f"nv_gpu_memory_total_bytes{labels} 1000.0",
        f"nv_gpu_memory_used_bytes{labels} 400.0",
        f"nv_gpu_power_usage{labels} 350.5",
        f"nv_gpu_power_limit{labels} 700.0",
        f"nv_energy_consumption{labels} 30.5",
        'greenlane_device_temperature_celsius{device="0"} 61.0',
        'greenlane_device_lost{device="0"} 0.0',
        'greenlane_device_clock_hertz{clock="sm",device="0"} 1.98e+09',
        'greenlane_device_throttled{device="0",reason="sw_power_cap"} 1.0',
        'greenlane_device_throttled{device="0",reason="hw_slowdown"} 0.0',
        'greenlane_device_ecc_errors_total{device="0",kind="uncorrected"} 2.0',
        'greenlane_device_xid_errors_total{device="0",xid="79"} 1.0',
        'greenlane_device_moved_bytes_total{device="0",path="memory"} 3e+12',
        'greenlane_device_moved_bytes_total{device="0",path="pcie_in"} 5.0',
        'greenlane_device_memory_bandwidth_bytes{device="0"} 3.35232e+12',
        'greenlane_device_health_age_seconds{device="0"} 2.0',
    }


def test_what_a_gpu_does_not_support_is_not_written() -> None:
    assert set(written(gpu("0"), readings={"0": Health(lost=True)})) == {
        'greenlane_device_lost{device="0"} 1.0',
        'greenlane_device_health_age_seconds{device="0"} 2.0',
    }


def test_a_partition_of_cores_is_as_busy_as_its_cores() -> None:
    device = ControlledDevice("0", {}, info=DeviceInfo("cpu", "", "core", (1, 1, 1), "4,6,7"))
    device.held = {"acme": PartitionInfo((0, 2), 2)}
    times = {4: CoreTime(0, 0), 6: CoreTime(0, 0), 7: CoreTime(0, 0)}, {4: CoreTime(1, 2), 6: CoreTime(2, 2), 7: CoreTime(0, 2)}
    assert set(written(device, readings={}, cores=times)) == {
        'greenlane_core_busy_seconds_total{core="4",device="0"} 1.0',
        'greenlane_core_busy_seconds_total{core="6",device="0"} 2.0',
        'greenlane_core_busy_seconds_total{core="7",device="0"} 0.0',
        'greenlane_partition_utilization_ratio{device="0",partition="0-2",tenant="acme"} 0.25',
    }
