"""Prometheus metrics, read from statistics that are kept anyway, and only when they are requested: no cost on the hot path.

Names and meanings are Triton's (docs/user_guide/metrics.md of its server repository), with the labels `tenant` and `partition`
added; the server's own are `greenlane_*`. Triton's counters lack the suffix `_total` that the client library would add to a
counter's name. So they are of its unknown type here, and counters in the text (`exposition`).
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import attrgetter, index

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from partitions.health import Health, cores_of, host_memory

from .. import __version__
from ..api.dependencies import RequireAdmin
from ..api.openapi import Responses, errors, operation_id
from ..config.tenant import TenantConfig
from ..control.controller import Controller
from ..control.fence import FencedTenant
from ..control.stretch import WidePartition
from ..http.compression import choose, compress
from ..observing.health import HealthMonitor
from ..observing.observers import Observers
from ..observing.overview import Details, details
from ..scheduling.limits import LIMITS
from ..tenants.catalog import UNLOADED
from ..tenants.frontend import ModelReport, Report
from ..tenants.statistics import BOUNDS, FIRST_BOUNDS, ModelStatistics
from . import exposition, memory, usage
from .dependencies import ControllerDep, ObserversDep
from .exposition import Rows, counter, gauge, tritons_counter

router = APIRouter(tags=["Metrics"], dependencies=[RequireAdmin], generate_unique_id_function=operation_id)

_LABELS = ["model", "version", "tenant", "partition"]
_MODEL_LABELS = _LABELS[:-1]
COUNTED = {
    "captures": ("greenlane_graph_captures", "CUDA graphs captured"),
    "compilations": ("greenlane_kernel_compilations", "Shapes for which kernels were compiled while serving"),
    "padded": ("greenlane_padded_inferences", "Inferences that ran padded to a larger batch"),
    "staged": ("greenlane_staged_inferences", "Inferences copied through pinned memory besides the tenant's slots"),
    "fallbacks": ("greenlane_graph_fallbacks", "Times a faster way to run was abandoned"),
}
"""Name and meaning of the metrics for executors' counts, by their names in `engines.base.COUNTS`."""
_NOT_RIGHT = ("wrong", "unverified")
_Family = Callable[[str, str, Sequence[str], Rows], Metric]
_BY_TENANT: tuple[tuple[_Family, str, str, str], ...] = (
    (gauge, "greenlane_tenant_ready", "1 while the tenant is served any of the models that it asks for", "ready"),
    (gauge, "greenlane_waiting_requests", "Requests waiting until in_flight lets them run", "lane.waiting"),
    (gauge, "greenlane_in_flight_requests", "Inferences handed to the worker and not completed", "lane.in_flight"),
    (counter, "greenlane_rejected_requests", "Requests refused for a full queue or memory", "lane.rejected"),
    (counter, "greenlane_expired_requests", "Requests whose timeout passed", "lane.expired"),
    (counter, "greenlane_invalid_requests", "Requests refused because they were wrong", "lane.invalid"),
    (counter, "greenlane_unread_answers", "Connections closed because their clients did not read their answers", "lane.unread"),
    (gauge, "greenlane_slot_bytes", "Bytes of the tenant's memory that its requests hold", "slots.nbytes"),
    (gauge, "greenlane_memory_bytes", "Bytes that the tenant's requests may hold", "memory"),
    (gauge, "greenlane_report_age_seconds", "Age of the tenant's report: above 0 while its process does not answer", "age"),
)
"""Metrics of a tenant's requests: kind, name, meaning, and the field of its report; `memory` is of its configuration."""
_DURATIONS = {
    "request": ("success", "Microseconds of answered requests from the complete body to the encoded answer"),
    "queue": ("queue", "Microseconds that they waited to run"),
    "compute_input": ("compute_input", "Microseconds in which their inputs were decoded"),
    "compute_infer": ("compute_infer", "Microseconds in which they ran"),
    "compute_output": ("compute_output", "Microseconds in which their outputs were encoded"),
}
"""Triton's names, the fields of `ModelStatistics`, and their meanings."""
_DOCUMENTED: Responses = {
    200: {"description": "Metrics in Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/metrics", response_class=Response, responses={**_DOCUMENTED, **errors(400, 401, 503)})
async def metrics(request: Request, controller: ControllerDep, observers: ObserversDep) -> Response:
    """All counts, by tenant and model. Compressed if the client takes that: there are a hundred lines for each."""
    reports, now, _ = await asyncio.gather(controller.reports(), details(controller), observers.accountant.collect())
    found = list(ServerCollector(controller, observers, reports, now).collect())
    body = await asyncio.to_thread(_written, found)  # Some megabytes, with thousands of models.
    if not (encoding := choose(request.headers.get("accept-encoding", ""))):
        return Response(body, media_type=CONTENT_TYPE_LATEST)
    headers = {"content-encoding": encoding, "vary": "accept-encoding"}
    return Response(await compress(body, encoding), media_type=CONTENT_TYPE_LATEST, headers=headers)


def _written(found: list[Metric]) -> bytes:
    return exposition.text(found, unknown="counter").encode()


class ServerCollector(Collector):
    """The metrics of a server at one moment; `reports` are those of its tenants."""

    def __init__(
        self, controller: Controller, observers: Observers, reports: Sequence[tuple[TenantConfig, Report]], now: Details
    ) -> None:
        self._controller = controller
        self._observers = observers
        self._now = now
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        served = [(self._labels(tenant.name, item), item) for tenant, report in self._reports for item in report.served]
        yield from _counts(served)
        yield _histogram(served)
        yield from _first_parts(served)
        yield _failures(served)
        pending = ((labels, item.pending) for labels, item in served)
        yield gauge("nv_inference_pending_request_count", "Requests waiting to run", _LABELS, pending)
        yield from self._models()
        yield self._readiness()
        yield from self._requests()
        yield targets(self._reports)
        yield from self._granules()
        yield from usage.families(self._controller, self._observers.accountant)
        yield from memory.families(self._now.memory)
        yield from wide(self._reports, {name: each.wide for name, each in self._now.beside.items() if each.wide})
        yield from fences({name: each.fence for name, each in self._now.beside.items() if each.fence})
        yield limits(self._reports)
        weights = {name: self._controller.config.version_weights(name) for name in self._controller.tenants}
        yield versions(weights, self._reports)
        yield from health(self._controller, self._observers.health)
        yield from processes(self._controller)

    def _labels(self, tenant: str, item: ModelReport) -> list[str]:
        return [item.name, item.version, tenant, self._partition(tenant)]

    def _partition(self, tenant: str) -> str:
        held = self._controller.partition(tenant)
        return "-".join(map(str, held.granules)) if held else ""

    def _models(self) -> Iterator[Metric]:
        """Executors' counts. They begin at 0 again when a model is loaded or moved, as Prometheus allows."""
        graphs = GaugeMetricFamily(
            "greenlane_model_graphs", "1 for the kind of CUDA graph that the model runs by", labels=[*_MODEL_LABELS, "graphs"]
        )
        families = {name: CounterMetricFamily(*about, labels=_MODEL_LABELS) for name, about in COUNTED.items()}
        cached = GaugeMetricFamily(
            "greenlane_kernel_cache_bytes",
            "Compiled kernels that were found in the cache when the model was loaded, and last saved there",
            labels=[*_MODEL_LABELS, "kernels"],
        )
        refused = GaugeMetricFamily(
            "greenlane_kernel_cache_refused",
            "1 if the library refused the kernels that were found, so that they were compiled again",
            labels=_MODEL_LABELS,
        )
        missing = GaugeMetricFamily(
            "greenlane_model_missing_sms",
            "SMs that the partition has fewer than an optimization profile is meant for with which the model runs",
            labels=_MODEL_LABELS,
        )
        unmeasured = GaugeMetricFamily(
            "greenlane_model_memory_unmeasured",
            "Kernels and graphs of the model of which it is not known what the driver took for them of the device's memory",
            labels=_MODEL_LABELS,
        )
        judged = GaugeMetricFamily(
            "greenlane_model_shapes",
            "Sets of input shapes of the model by what was found of its answers: right, wrong (and run in another way or "
            "refused), or unverified, as there was nothing to compare with",
            labels=[*_MODEL_LABELS, "verdict"],
        )
        for execution in self._now.executions:
            with suppress(KeyError, TypeError):  # What one process describes badly breaks no other tenant's metrics.
                labels = [execution.name, execution.version, execution.tenant]
                graphs.add_metric([*labels, str(execution.description["graphs"])], 1)
                if isinstance(kernels := execution.description.get("kernels"), dict):
                    for which in ("found", "saved"):
                        cached.add_metric([*labels, which], index(kernels[which]))
                    refused.add_metric(labels, index(kernels["refused"]))
                if isinstance(lacking := execution.description.get("missing_sms"), int):
                    missing.add_metric(labels, lacking)
                if isinstance(driver := execution.description.get("driver_memory"), dict):
                    unmeasured.add_metric(labels, index(driver["unmeasured"]))
                if isinstance(verified := execution.description.get("verified"), dict):
                    others = [each["verdict"] for each in verified["others"]]
                    for verdict, count in (("right", verified["right"]), *((word, others.count(word)) for word in _NOT_RIGHT)):
                        judged.add_metric([*labels, verdict], index(count))
                counts = execution.description.get("counts")
                for name, count in counts.items() if isinstance(counts, dict) else ():
                    if name in families:
                        families[name].add_metric(labels, index(count))
        yield from (graphs, *families.values(), cached, refused, missing, unmeasured, judged)

    def _readiness(self) -> Metric:
        about = "1 for a model that is served, 0 for one that is loading or could not be loaded; none once it was unloaded"
        ready: dict[tuple[str, str, str], bool] = {}
        for tenant, report in self._reports:
            for entry in report.index:
                if entry.reason != UNLOADED:
                    which = entry.name, entry.version, tenant.name
                    ready[which] = entry.state == "READY" or ready.get(which, False)
        return gauge("greenlane_model_ready", about, _MODEL_LABELS, ((which, float(each)) for which, each in ready.items()))

    def _requests(self) -> Iterator[Metric]:
        for kind, name, about, field in _BY_TENANT:
            found = ((tenant, attrgetter(field)(tenant if field == "memory" else report)) for tenant, report in self._reports)
            yield kind(name, about, ["tenant"], (([tenant.name], float(value)) for tenant, value in found))

    def _granules(self) -> Iterator[Metric]:
        held = ((tenant.name, self._controller.partition(tenant.name)) for tenant, _ in self._reports)
        counts = (([name, self._partition(name)], len(each.granules) if each else 0) for name, each in held)
        yield gauge("greenlane_partition_granules", "Granules held", ["tenant", "partition"], counts)
        yield from self._devices()
        yield GaugeMetricFamily("greenlane_ready", "1 while the server accepts new work", value=float(self._controller.ready))
        changes = self._controller.repartitions
        yield CounterMetricFamily("greenlane_repartitions", "Repartitions, the initial partitions included", value=changes)

    def _devices(self) -> Iterator[Metric]:
        devices = self._controller.devices
        kinds = (([each.name, each.info.kind], 1) for each in devices)
        yield gauge("greenlane_device_info", "1 for each device, with its kind", ["device", "kind"], kinds)
        granules = (([each.name], len(each.info.granules)) for each in devices)
        yield gauge("greenlane_device_granules", "Granules of the device", ["device"], granules)
        free = (([each.name], each.free) for each in devices)
        yield gauge("greenlane_device_free_granules", "Granules that no tenant has", ["device"], free)
        serving = (([each.name], float(self._controller.device_state(each) != "restarting")) for each in devices)
        about = "0 while the device's process has ended and is started again"
        yield gauge("greenlane_device_serving", about, ["device"], serving)
        tenants = (([tenant, each.name], 1) for each in devices for tenant in each.runtimes)
        yield gauge("greenlane_tenant_device", "1 for the device that it is on", ["tenant", "device"], tenants)


def _counts(served: list[tuple[list[str], ModelReport]]) -> Iterator[Metric]:
    found = [(labels, item.statistics) for labels, item in served]
    success = ((labels, each.success.count) for labels, each in found)
    yield tritons_counter("nv_inference_request_success", "Requests answered", _LABELS, success)
    rows = ((labels, each.inferences) for labels, each in found)
    yield tritons_counter("nv_inference_count", "Inferences, each row of a batch counted", _LABELS, rows)
    runs = ((labels, each.executions) for labels, each in found)
    yield tritons_counter("nv_inference_exec_count", "Runs of the model", _LABELS, runs)
    for name, (field, about) in _DURATIONS.items():
        spent = ((labels, getattr(each, field).ns / 1000) for labels, each in found)
        yield tritons_counter(f"nv_inference_{name}_duration_us", about, _LABELS, spent)


def _histogram(served: list[tuple[list[str], ModelReport]]) -> Metric:
    """Without the label `partition`, so that quantiles over time continue across a repartition."""
    name, about = "greenlane_request_duration_seconds", "From the complete body to the encoded answer, of requests answered"
    family = HistogramMetricFamily(name, about, labels=_LABELS[:-1])
    for labels, item in served:
        family.add_metric(labels[:-1], _buckets(item.statistics), item.statistics.success.ns / 1e9)
    return family


def _first_parts(served: list[tuple[list[str], ModelReport]]) -> Iterator[Metric]:
    """Triton's, of models that answer in parts: as soon as one has."""
    about = "Milliseconds from the complete request to the first part of an answer"
    family = HistogramMetricFamily("nv_inference_first_response_histogram_ms", about, labels=_LABELS)
    for labels, item in served:
        if any(item.statistics.firsts):
            bounds = [*(str(bound // 10**6) for bound in FIRST_BOUNDS), "+Inf"]
            buckets = list(zip(bounds, accumulate(item.statistics.firsts), strict=True))
            family.add_metric(labels, buckets, item.statistics.firsts_ns / 1e6)
    if family.samples:
        yield family


def _buckets(statistics: ModelStatistics) -> list[tuple[str, float]]:
    """Prometheus' cumulative buckets: each includes those below it."""
    bounds = [*(str(bound / 1e9) for bound in BOUNDS), "+Inf"]
    return list(zip(bounds, accumulate(statistics.buckets), strict=True))


def _failures(served: list[tuple[list[str], ModelReport]]) -> Metric:
    reasons = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    rows = (([*labels, why], item.statistics.failures.get(why, 0)) for labels, item in served for why in reasons)
    return tritons_counter("nv_inference_request_failure", "Requests refused or failed", [*_LABELS, "reason"], rows)


Reports = Sequence[tuple[TenantConfig, Report]]
Weights = Mapping[str, Mapping[str, float]]
"""Of versions, by model; see `Config.version_weights`."""


def wide(reports: Reports, states: Mapping[str, WidePartition]) -> Iterator[Metric]:
    """Of tenants that lend and borrow, where there are any. `states` are their wide partitions, by tenant."""
    lenders = [(tenant.name, *report.lending) for tenant, report in reports if report.lending]
    if lenders:
        now = (([name], lends) for name, lends, _ in lenders)
        yield gauge("greenlane_lends", "1 while others may use its granules when it is idle", ["tenant"], now)
        stops = (([name], count) for name, _, count in lenders)
        yield counter("greenlane_lending_stops", "Times it stopped lending as that cost it too much latency", ["tenant"], stops)
    if states:
        launches = (([name], each.launches) for name, each in states.items())
        yield counter("greenlane_wide_launches", "Inferences on granules of others too", ["tenant"], launches)
        returns = (([name], each.returns) for name, each in states.items())
        yield counter("greenlane_wide_returns", "Those of them during which a lender had a request again", ["tenant"], returns)
        home = (([name, why], count) for name, each in states.items() for why, count in each.home_launches.items())
        about = "Inferences of a tenant with a wide partition that stayed on its own granules, by why"
        yield counter("greenlane_home_launches", about, ["tenant", "reason"], home)


def fences(states: Mapping[str, FencedTenant]) -> Iterator[Metric]:
    """Of tenants that are held to a share of bandwidth, where there are any."""
    if states:
        paths = [(name, path, rate) for name, each in states.items() for path, rate in _held(each)]
        about = "What the tenant is held to while others of its device are at work"
        yield gauge(
            "greenlane_fence_bytes_per_second", about, ["tenant", "path"], (([name, p], rate) for name, p, rate in paths)
        )
        launches = (([name], each.launches) for name, each in states.items())
        about = "Inferences on fewer of its granules, as elsewhere they draw more of the memory"
        yield counter("greenlane_narrow_launches", about, ["tenant"], launches)
        waits = (([name], each.waits) for name, each in states.items())
        yield counter("greenlane_pcie_waits", "Inferences that started later for its share of PCIe", ["tenant"], waits)
        counted = (([name], each.moved) for name, each in states.items() if each.moved is not None)
        yield counter("greenlane_fence_moved_bytes", "Bytes of memory that its cores moved, by resctrl", ["tenant"], counted)


def _held(fence: FencedTenant) -> Iterator[tuple[str, int]]:
    """The paths that are held, and to which rate."""
    yield from ((path, rate) for path, rate in (("memory", fence.memory_bandwidth), ("pcie", fence.pcie)) if rate)


def limits(reports: Reports) -> Metric:
    """Refusals for each limit of each tenant, by its key in the configuration."""
    refused = (
        ([tenant.name, limit], count)
        for tenant, report in reports
        for limit, count in zip(LIMITS, report.lane.limited, strict=True)
    )
    about = "Requests refused with 429 for one of the tenant's limits"
    return counter("greenlane_limited_requests", about, ["tenant", "limit"], refused)


def targets(reports: Reports) -> Metric:
    """Of tenants that have one."""
    asked = (([tenant.name], tenant.target_p99) for tenant, _ in reports if tenant.target_p99 is not None)
    return gauge("greenlane_target_p99_seconds", "What target_p99 asks for", ["tenant"], asked)


def versions(by_tenant: Mapping[str, Weights], reports: Reports) -> Metric:
    """The share of each version that is served, of models with weights."""
    about = "Part of the requests without a version that this version gets, by its weight"
    return gauge("greenlane_version_share_ratio", about, ["model", "version", "tenant"], _shares(by_tenant, reports))


def _shares(by_tenant: Mapping[str, Weights], reports: Reports) -> Rows:
    for tenant, report in reports:
        weights = by_tenant.get(tenant.name, {})  # It may have gone since it was asked for its report.
        served = [(item.name, item.version) for item in report.served if item.name in weights]
        for name, version in served:
            whole = sum(weights[name].get(other, 0.0) for model, other in served if model == name)
            if whole:
                yield [name, version, tenant.name], weights[name].get(version, 0.0) / whole


_DEVICE = ["device"]
_GPU = ["gpu_uuid", "device"]


def health(controller: Controller, monitor: HealthMonitor) -> Iterator[Metric]:
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
