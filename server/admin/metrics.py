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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api.dependencies import RequireAdmin
from ..api.openapi import Responses, errors, operation_id
from ..config.tenant import TenantConfig
from ..control.controller import Controller
from ..http.compression import choose, compress
from ..observing.observers import Observers
from ..observing.overview import Details, details
from ..tenants.catalog import UNLOADED
from ..tenants.frontend import ModelReport, Report
from ..tenants.statistics import BOUNDS, FIRST_BOUNDS, ModelStatistics
from . import exposition, health_metrics, tenant_metrics, usage
from .dependencies import ControllerDep, ObserversDep
from .exposition import Rows, counter, gauge, tritons_counter
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
_Family = Callable[[str, str, Sequence[str], Rows], Metric]
_BY_TENANT: tuple[tuple[_Family, str, str, Callable[[TenantConfig, Report], float]], ...] = (
    (
        gauge,
        "greenlane_tenant_ready",
        "1 while the tenant is served any of the models that it asks for",
        lambda _, now: now.ready,
    ),
    (gauge, "greenlane_waiting_requests", "Requests waiting until in_flight lets them run", lambda _, now: now.lane.waiting),
    (
        gauge,
        "greenlane_in_flight_requests",
        "Inferences handed to the worker and not completed",
        lambda _, now: now.lane.in_flight,
    ),
    (counter, "greenlane_rejected_requests", "Requests refused for a full queue or memory", lambda _, now: now.lane.rejected),
    (counter, "greenlane_expired_requests", "Requests whose timeout passed", lambda _, now: now.lane.expired),
    (counter, "greenlane_invalid_requests", "Requests refused because they were wrong", lambda _, now: now.lane.invalid),
    (
        counter,
        "greenlane_unread_answers",
        "Connections closed because their clients did not read their answers",
        lambda _, now: now.lane.unread,
    ),
    (gauge, "greenlane_slot_bytes", "Bytes of the tenant's memory that its requests hold", lambda _, now: now.slots.nbytes),
    (gauge, "greenlane_memory_bytes", "Bytes that the tenant's requests may hold", lambda tenant, _: tenant.memory),
    (
        gauge,
        "greenlane_report_age_seconds",
        "Age of the tenant's report: above 0 while its process does not answer",
        lambda _, now: now.age,
    ),
)
"""Metrics of a tenant's requests: kind, name, meaning, and the value in a tenant's report."""
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
        self,
        controller: Controller,
        observers: Observers,
        reports: Sequence[tuple[TenantConfig, Report]],
        now: Details,
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
        yield tenant_metrics.targets(self._reports)
        yield from self._granules()
        yield from usage.families(self._controller, self._observers.accountant)
        yield from families(self._now.memory)
        yield from tenant_metrics.wide(self._reports, self._now.wide)
        yield from tenant_metrics.fences(self._now.fences)
        yield tenant_metrics.limits(self._reports)
        weights = {name: self._controller.config.version_weights(name) for name in self._controller.tenants}
        yield tenant_metrics.versions(weights, self._reports)
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
        for kind, name, about, value in _BY_TENANT:
            rows = (([tenant.name], float(value(tenant, report))) for tenant, report in self._reports)
            yield kind(name, about, ["tenant"], rows)

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
