"""Prometheus metrics, read from statistics that are kept anyway, and only when they are requested: no cost on the hot path.

Names and meanings are Triton's (docs/user_guide/metrics.md of its server repository), with the labels `tenant` and `partition`
added; the server's own are `greenlane_*`. Triton's counters lack the suffix `_total` that the client library would add to a
counter's name. So they are of its unknown type here, and counters in the text (`exposition`).
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import index

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from ..api.dependencies import RequireAdmin
from ..api.openapi import Responses, errors, operation_id
from ..config.tenant import TenantConfig
from ..control.controller import Controller
from ..control.descriptions import Execution, TenantMemory
from ..control.stretch import WideState
from ..http.compression import choose, compress
from ..observing.observers import Observers
from ..tenants.catalog import UNLOADED
from ..tenants.frontend import ModelReport, Report
from ..tenants.statistics import BOUNDS, FIRST_BOUNDS, ModelStatistics
from . import exposition, health_metrics, lending_metrics, limit_metrics, usage_metrics, version_metrics
from .dependencies import ControllerDep, ObserversDep
from .memory import families

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
_BY_TENANT: tuple[
    tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[TenantConfig, Report], float]], ...
] = (
    (
        GaugeMetricFamily,
        "greenlane_tenant_ready",
        "1 while the tenant is served any of the models that it asks for",
        lambda _, report: float(report.ready),
    ),
    (
        GaugeMetricFamily,
        "greenlane_waiting_requests",
        "Requests waiting until in_flight lets them run",
        lambda _, report: report.lane.waiting,
    ),
    (
        GaugeMetricFamily,
        "greenlane_in_flight_requests",
        "Inferences handed to the worker and not completed",
        lambda _, report: report.lane.in_flight,
    ),
    (
        CounterMetricFamily,
        "greenlane_rejected_requests",
        "Requests refused for a full queue or memory",
        lambda _, report: report.lane.rejected,
    ),
    (
        CounterMetricFamily,
        "greenlane_expired_requests",
        "Requests whose timeout passed",
        lambda _, report: report.lane.expired,
    ),
    (
        CounterMetricFamily,
        "greenlane_invalid_requests",
        "Requests refused because they were wrong",
        lambda _, report: report.lane.invalid,
    ),
    (
        CounterMetricFamily,
        "greenlane_unread_answers",
        "Connections closed because their clients did not read their answers",
        lambda _, report: report.lane.unread,
    ),
    (
        GaugeMetricFamily,
        "greenlane_slot_bytes",
        "Bytes of the tenant's memory that its requests hold",
        lambda _, report: report.slots.nbytes,
    ),
    (
        GaugeMetricFamily,
        "greenlane_memory_bytes",
        "Bytes that the tenant's requests may hold",
        lambda tenant, _: tenant.memory,
    ),
    (
        GaugeMetricFamily,
        "greenlane_report_age_seconds",
        "Age of the tenant's report: above 0 while its process does not answer",
        lambda _, report: report.age,
    ),
)
"""Metrics of a tenant's requests: type, name, meaning, and the value in a tenant's report."""
_DURATIONS = {
    "request": "success",
    "queue": "queue",
    "compute_input": "compute_input",
    "compute_infer": "compute_infer",
    "compute_output": "compute_output",
}


_ABOUT_DURATIONS = {
    "request": "Microseconds of answered requests from the complete body to the encoded answer",
    "queue": "Microseconds that they waited to run",
    "compute_input": "Microseconds in which their inputs were decoded",
    "compute_infer": "Microseconds in which they ran",
    "compute_output": "Microseconds in which their outputs were encoded",
}
_DOCUMENTED: Responses = {
    200: {"description": "Metrics in Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/metrics", response_class=Response, responses={**_DOCUMENTED, **errors(400, 401, 503)})
async def metrics(request: Request, controller: ControllerDep, observers: ObserversDep) -> Response:
    """All counts, by tenant and model. Compressed if the client takes that: there are a hundred lines for each."""
    reports, executions, memory, wide, _ = await asyncio.gather(
        controller.reports(),
        controller.executions(),
        controller.memory(),
        controller.placements.wide_states(),
        observers.accountant.collect(),
    )
    found = list(ServerCollector(controller, observers, reports, executions, memory, wide).collect())
    body = await asyncio.to_thread(_written, found)  # Some megabytes, with thousands of models.
    if not (encoding := choose(request.headers.get("accept-encoding", ""))):
        return Response(body, media_type=CONTENT_TYPE_LATEST)
    headers = {"content-encoding": encoding, "vary": "accept-encoding"}
    return Response(await compress(body, encoding), media_type=CONTENT_TYPE_LATEST, headers=headers)


def _written(found: list[Metric]) -> bytes:
    return exposition.text(found, unknown="counter").encode()


class ServerCollector(Collector):
    """The metrics of a server at one moment; `reports` are those of its tenants, `executions` those of their models, which take
    `memory` of the device, and `wide` the tenants' wide partitions.
    """

    def __init__(
        self,
        controller: Controller,
        observers: Observers,
        reports: Sequence[tuple[TenantConfig, Report]],
        executions: Sequence[Execution],
        memory: Sequence[TenantMemory] = (),
        wide: Sequence[WideState] = (),
    ) -> None:
        self._controller = controller
        self._observers = observers
        self._executions = executions
        self._memory = memory
        self._wide = wide
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        served = [(self._labels(tenant.name, item), item) for tenant, report in self._reports for item in report.served]
        yield from _counts(served)
        yield from _durations(served)
        yield _histogram(served)
        yield from _first_parts(served)
        yield from _failures(served)
        yield _pending(served)
        yield from self._models()
        yield self._readiness()
        yield from self._requests()
        yield self._targets()
        yield from self._granules()
        yield from usage_metrics.families(self._controller, self._observers.accountant)
        yield from families(self._memory)
        yield from lending_metrics.families(self._reports, self._wide)
        yield limit_metrics.family(self._reports)
        weights = {name: self._controller.config.version_weights(name) for name in self._controller.tenants}
        yield version_metrics.family(weights, self._reports)
        yield from health_metrics.families(self._controller, self._observers.health)
        yield from health_metrics.processes(self._controller)

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
        for execution in self._executions:
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
        family = GaugeMetricFamily("greenlane_model_ready", about, labels=_MODEL_LABELS)
        for tenant, report in self._reports:
            ready: dict[tuple[str, str], bool] = {}
            for entry in report.index:
                if entry.reason != UNLOADED:
                    which = entry.name, entry.version
                    ready[which] = entry.state == "READY" or ready.get(which, False)
            for (name, version), is_ready in ready.items():
                family.add_metric([name, version, tenant.name], float(is_ready))
        return family

    def _targets(self) -> Metric:
        family = GaugeMetricFamily("greenlane_target_p99_seconds", "What target_p99 asks for", labels=["tenant"])
        for tenant, _ in self._reports:
            if tenant.target_p99 is not None:
                family.add_metric([tenant.name], tenant.target_p99)
        return family

    def _requests(self) -> Iterator[Metric]:
        for kind, name, about, value in _BY_TENANT:
            family = kind(name, about, labels=["tenant"])
            for tenant, report in self._reports:
                family.add_metric([tenant.name], value(tenant, report))
            yield family

    def _granules(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("greenlane_partition_granules", "Granules held", labels=["tenant", "partition"])
        for tenant, _ in self._reports:
            partition = self._controller.partition(tenant.name)
            held.add_metric([tenant.name, self._partition(tenant.name)], len(partition.granules) if partition else 0)
        yield held
        yield from self._devices()
        yield GaugeMetricFamily("greenlane_ready", "1 while the server accepts new work", value=float(self._controller.ready))
        changes = self._controller.repartitions
        yield CounterMetricFamily("greenlane_repartitions", "Repartitions, the initial partitions included", value=changes)

    def _devices(self) -> Iterator[Metric]:
        about = GaugeMetricFamily("greenlane_device_info", "1 for each device, with its kind", labels=["device", "kind"])
        granules = GaugeMetricFamily("greenlane_device_granules", "Granules of the device", labels=["device"])
        free = GaugeMetricFamily("greenlane_device_free_granules", "Granules that no tenant has", labels=["device"])
        serving = GaugeMetricFamily(
            "greenlane_device_serving", "0 while the device's process has ended and is started again", labels=["device"]
        )
        tenants = GaugeMetricFamily("greenlane_tenant_device", "1 for the device that it is on", labels=["tenant", "device"])
        for device in self._controller.devices:
            about.add_metric([device.name, device.info.kind], 1)
            granules.add_metric([device.name], len(device.info.granules))
            free.add_metric([device.name], device.free)
            serving.add_metric([device.name], float(self._controller.device_state(device) != "restarting"))
            for tenant in device.runtimes:
                tenants.add_metric([tenant, device.name], 1)
        yield from (about, granules, free, serving, tenants)


def _pending(served: list[tuple[list[str], ModelReport]]) -> Metric:
    family = GaugeMetricFamily("nv_inference_pending_request_count", "Requests waiting to run", labels=_LABELS)
    for labels, item in served:
        family.add_metric(labels, item.pending)
    return family


def _counts(served: list[tuple[list[str], ModelReport]]) -> Iterator[Metric]:
    success = UnknownMetricFamily("nv_inference_request_success", "Requests answered", labels=_LABELS)
    count = UnknownMetricFamily("nv_inference_count", "Inferences, each row of a batch counted", labels=_LABELS)
    runs = UnknownMetricFamily("nv_inference_exec_count", "Runs of the model", labels=_LABELS)
    for labels, item in served:
        success.add_metric(labels, item.statistics.success.count)
        count.add_metric(labels, item.statistics.inferences)
        runs.add_metric(labels, item.statistics.executions)
    yield from (success, count, runs)


def _durations(served: list[tuple[list[str], ModelReport]]) -> Iterator[Metric]:
    for name, field in _DURATIONS.items():
        family = UnknownMetricFamily(f"nv_inference_{name}_duration_us", _ABOUT_DURATIONS[name], labels=_LABELS)
        for labels, item in served:
            family.add_metric(labels, getattr(item.statistics, field).ns / 1000)
        yield family


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


def _failures(served: list[tuple[list[str], ModelReport]]) -> Iterator[Metric]:
    family = UnknownMetricFamily("nv_inference_request_failure", "Requests refused or failed", labels=[*_LABELS, "reason"])
    for labels, item in served:
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
            family.add_metric([*labels, reason], item.statistics.failures.get(reason, 0))
    yield family
