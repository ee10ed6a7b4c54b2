"""Metrics of devices' state, of cores and of processes. Names that begin with `nv_` and their units are Triton's."""

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import GaugeMetricFamily, Metric

from partitions.health import Health, cores_of, host_memory

from .. import __version__
from ..control.controller import Controller
from ..observing.health import HealthMonitor
from .exposition import Rows, counter, gauge, tritons_counter

_DEVICE = ["device"]
_GPU = ["gpu_uuid", "device"]


def families(controller: Controller, monitor: HealthMonitor) -> Iterator[Metric]:
    """What was last read; nothing here asks a device."""
    yield from _host(monitor)
    yield from _partitions(controller, monitor)
    readings = [(device.name, *found) for device in controller.devices if (found := monitor.reading(device.name))]
    if readings:
        yield from _gpus(monitor, [(name, health) for name, health, _ in readings])
        yield from _states([(name, health) for name, health, _ in readings])
        ages = (([name], seconds) for name, _, seconds in readings)
        yield gauge("greenlane_device_health_age_seconds", "Age of what was read of the device", _DEVICE, ages)


def processes(controller: Controller) -> Iterator[Metric]:
    """The server's own: its version, when it was started, and which of its processes were replaced."""
    yield gauge("greenlane_build_info", "1, with the version of the server", ["version"], [([__version__], 1)])
    restarts = (([process], count) for process, count in controller.restarts.items())
    about = "Times this process ended unexpectedly and was started again"
    yield counter("greenlane_process_restarts", about, ["process"], restarts)
    refused = (([reason], count) for reason, count in controller.refused_connections.items())
    about = "Connections that the dispatcher refused, as no process takes them"
    yield counter("greenlane_refused_connections", about, ["reason"], refused)
    started = "Time at which the server was started, in seconds since 1970"
    yield GaugeMetricFamily("greenlane_start_time_seconds", started, value=controller.started)


def _host(monitor: HealthMonitor) -> Iterator[Metric]:
    cores = monitor.cores
    utilization = monitor.busy(list(cores))
    if utilization is not None:
        yield GaugeMetricFamily("nv_cpu_utilization", "Part of the host's cores that was busy, 0 to 1", value=utilization)
    with suppress(OSError, KeyError):
        total, used = host_memory()
        yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "Bytes of the host's memory", value=total)
        yield GaugeMetricFamily("nv_cpu_memory_used_bytes", "Bytes of the host's memory that are in use", value=used)


def _partitions(controller: Controller, monitor: HealthMonitor) -> Iterator[Metric]:
    """Of partitions that are cores. What runs on a GPU's partition is in the account: see `usage`."""
    devices = [(device, cores) for device in controller.devices if (cores := cores_of(device.info.address))]
    busy = [
        ([device.name, str(core)], time.busy)
        for device, cores in devices
        for core in cores
        if (time := monitor.cores.get(core))
    ]
    parts = (
        ([tenant, "-".join(map(str, partition.granules)), device.name], ratio)
        for device, cores in devices
        for tenant, partition in device.held.items()
        if (ratio := monitor.busy([cores[granule] for granule in partition.granules])) is not None
    )
    if busy:
        about = "Seconds in which the core was busy, with other programs too"
        yield counter("greenlane_core_busy_seconds", about, ["device", "core"], busy)
        about = "Part of the time in which the partition's cores were busy, 0 to 1, with other programs too"
        yield gauge("greenlane_partition_utilization_ratio", about, ["tenant", "partition", "device"], parts)


def _gpus(monitor: HealthMonitor, readings: list[tuple[str, Health]]) -> Iterator[Metric]:
    """Triton's."""
    gauges = {
        "nv_gpu_utilization": ("Part of the time in which a kernel ran on the GPU, 0 to 1", "utilization"),
        "nv_gpu_memory_total_bytes": ("Bytes of the GPU's memory", "memory_total"),
        "nv_gpu_memory_used_bytes": ("Bytes of the GPU's memory that are in use", "memory_used"),
        "nv_gpu_power_usage": ("Watts that the GPU takes", "power"),
        "nv_gpu_power_limit": ("Watts that the GPU may take", "power_limit"),
    }
    for name, (about, field) in gauges.items():
        known = ((health.uuid, device, getattr(health, field)) for device, health in readings)
        yield gauge(name, about, _GPU, (([uuid, device], value) for uuid, device, value in known if value is not None))
    taken = (([health.uuid, device], joules) for device, health in readings if (joules := monitor.energy(device)) is not None)
    yield tritons_counter("nv_energy_consumption", "Joules that the GPU took since the server was started", _GPU, taken)


def _states(readings: list[tuple[str, Health]]) -> Iterator[Metric]:
    def known(field: str) -> Rows:
        values = ((device, getattr(health, field)) for device, health in readings)
        return (([device], float(value)) for device, value in values if value is not None)

    about = "Part of the time in which its memory was read or written"
    yield gauge("greenlane_device_memory_utilization_ratio", about, _DEVICE, known("memory_utilization"))
    about = "Bytes a second that its memory can move"
    yield gauge("greenlane_device_memory_bandwidth_bytes", about, _DEVICE, known("memory_bandwidth"))
    yield gauge("greenlane_device_temperature_celsius", "Temperature of the device", _DEVICE, known("temperature"))
    yield gauge("greenlane_device_lost", "1 for a device that does not answer on the bus any more", _DEVICE, known("lost"))
    tables = (
        (gauge, "greenlane_device_clock_hertz", "Clock of the device now", "clock", "clocks"),
        (gauge, "greenlane_device_throttled", "1 while clocks are kept low for this reason", "reason", "throttled"),
        (counter, "greenlane_device_ecc_errors", "Memory errors since the driver was loaded", "kind", "ecc"),
        (counter, "greenlane_device_xid_errors", "Errors that the driver reported while this was watched", "xid", "xids"),
        (counter, "greenlane_device_moved_bytes", "Bytes that the device moved while this was watched", "path", "moved"),
    )
    for family, name, about, label, field in tables:
        values = ((device, getattr(health, field)) for device, health in readings)
        rows = (([device, key], float(each)) for device, table in values for key, each in table.items())
        yield family(name, about, ["device", label], rows)
