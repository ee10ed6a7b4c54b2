"""Metrics of devices' state, of cores and of processes. Names that begin with `nv_` and their units are Triton's."""

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily

from partitions.health import Health, cores_of, host_memory

from .. import __version__
from ..control.controller import Controller
from ..observing.health import HealthMonitor

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
        age = GaugeMetricFamily("greenlane_device_health_age_seconds", "Age of what was read of the device", labels=_DEVICE)
        for name, _, seconds in readings:
            age.add_metric([name], seconds)
        yield age


def processes(controller: Controller) -> Iterator[Metric]:
    """The server's own: its version, when it was started, and which of its processes were replaced."""
    about = GaugeMetricFamily("greenlane_build_info", "1, with the version of the server", labels=["version"])
    about.add_metric([__version__], 1)
    restarts = CounterMetricFamily(
        "greenlane_process_restarts", "Times this process ended unexpectedly and was started again", labels=["process"]
    )
    for process, count in controller.restarts.items():
        restarts.add_metric([process], count)
    refused = CounterMetricFamily(
        "greenlane_refused_connections", "Connections that the dispatcher refused, as no process takes them", labels=["reason"]
    )
    for reason, count in controller.refused_connections.items():
        refused.add_metric([reason], count)
    started = "Time at which the server was started, in seconds since 1970"
    yield from (about, restarts, refused, GaugeMetricFamily("greenlane_start_time_seconds", started, value=controller.started))


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
    """Of partitions that are cores. What runs on a GPU's partition is in the account: see usage_metrics."""
    busy = CounterMetricFamily(
        "greenlane_core_busy_seconds", "Seconds in which the core was busy, with other programs too", labels=["device", "core"]
    )
    parts = GaugeMetricFamily(
        "greenlane_partition_utilization_ratio",
        "Part of the time in which the partition's cores were busy, 0 to 1, with other programs too",
        labels=["tenant", "partition", "device"],
    )
    for device in controller.devices:
        cores = cores_of(device.info.address)
        for core in cores:
            if time := monitor.cores.get(core):
                busy.add_metric([device.name, str(core)], time.busy)
        for tenant, partition in device.held.items() if cores else ():
            ratio = monitor.busy([cores[granule] for granule in partition.granules])
            if ratio is not None:
                parts.add_metric([tenant, "-".join(map(str, partition.granules)), device.name], ratio)
    if busy.samples:
        yield from (busy, parts)


def _gpus(monitor: HealthMonitor, readings: list[tuple[str, Health]]) -> Iterator[Metric]:
    """Triton's. Its counter of energy has no suffix; `metrics` corrects the type."""
    gauges = {
        "nv_gpu_utilization": ("Part of the time in which a kernel ran on the GPU, 0 to 1", "utilization"),
        "nv_gpu_memory_total_bytes": ("Bytes of the GPU's memory", "memory_total"),
        "nv_gpu_memory_used_bytes": ("Bytes of the GPU's memory that are in use", "memory_used"),
        "nv_gpu_power_usage": ("Watts that the GPU takes", "power"),
        "nv_gpu_power_limit": ("Watts that the GPU may take", "power_limit"),
    }
    for name, (about, field) in gauges.items():
        family = GaugeMetricFamily(name, about, labels=_GPU)
        for device, health in readings:
            if (value := getattr(health, field)) is not None:
                family.add_metric([health.uuid, device], value)
        yield family
    energy = UnknownMetricFamily("nv_energy_consumption", "Joules that the GPU took since the server was started", labels=_GPU)
    for device, health in readings:
        if (joules := monitor.energy(device)) is not None:
            energy.add_metric([health.uuid, device], joules)
    yield energy


def _states(readings: list[tuple[str, Health]]) -> Iterator[Metric]:
    memory = GaugeMetricFamily(
        "greenlane_device_memory_utilization_ratio", "Part of the time in which its memory was read or written", labels=_DEVICE
    )
    temperature = GaugeMetricFamily("greenlane_device_temperature_celsius", "Temperature of the device", labels=_DEVICE)
    lost = GaugeMetricFamily("greenlane_device_lost", "1 for a device that does not answer on the bus any more", labels=_DEVICE)
    clocks = GaugeMetricFamily("greenlane_device_clock_hertz", "Clock of the device now", labels=["device", "clock"])
    throttled = GaugeMetricFamily(
        "greenlane_device_throttled", "1 while clocks are kept low for this reason", labels=["device", "reason"]
    )
    ecc = CounterMetricFamily(
        "greenlane_device_ecc_errors", "Memory errors since the driver was loaded", labels=["device", "kind"]
    )
    xids = CounterMetricFamily(
        "greenlane_device_xid_errors", "Errors that the driver reported while this was watched", labels=["device", "xid"]
    )
    for device, health in readings:
        lost.add_metric([device], float(health.lost))
        for family, value in ((memory, health.memory_utilization), (temperature, health.temperature)):
            if value is not None:
                family.add_metric([device], value)
        tables = ((clocks, health.clocks), (throttled, health.throttled), (ecc, health.ecc), (xids, health.xids))
        for table, values in tables:
            for key, each in values.items():
                table.add_metric([device, key], float(each))
    yield from (memory, temperature, lost, clocks, throttled, ecc, xids)
