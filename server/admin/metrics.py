"""Prometheus metrics, read off the statistics when somebody asks: nothing is counted twice, nothing on the hot path.

Names and meanings are Triton's (docs/user_guide/metrics.md of its server repository), with the labels `tenant` and
`partition` added, and our own as `greenlane_*`. Triton's counters have no `_total` at the end, which the client library
would add: it is given them as untyped, and their type is put right in its text.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from ..api.dependencies import IsAdmin
from ..config.schema import TenantConfig
from ..device.runtime import Runtime
from ..tenants.frontend import Counted, Report
from ..tenants.statistics import BOUNDS, ModelStatistics
from .dependencies import TheRuntime

router = APIRouter(dependencies=[IsAdmin])

_LABELS = ["model", "version", "tenant", "partition"]
_OWN = _LABELS[:-1]
COUNTED = {
    "captures": ("greenlane_graph_captures", "CUDA graphs captured"),
    "compilations": ("greenlane_kernel_compilations", "Shapes for which kernels were compiled while serving"),
    "padded": ("greenlane_padded_inferences", "Inferences that ran padded to a larger batch"),
    "staged": ("greenlane_staged_inferences", "Inferences copied through pinned memory besides the tenant's slots"),
    "fallbacks": ("greenlane_graph_fallbacks", "Times that a faster way to run was given up"),
}
"""The counts of executors that are told, see `engines.base.COUNTS`: the name and the meaning of each."""
_UNTYPED = re.compile(rb"^(# TYPE nv_\w+) untyped$", re.MULTILINE)
"""Every one of Triton's series but its gauges."""
_DURATIONS = {
    "request": "success",
    "queue": "queue",
    "compute_input": "compute_input",
    "compute_infer": "compute_infer",
    "compute_output": "compute_output",
}


@router.get("/metrics")
async def metrics(runtime: TheRuntime) -> Response:
    registry = CollectorRegistry()
    registry.register(RuntimeCollector(runtime, await runtime.reports()))
    text = _UNTYPED.sub(rb"\1 counter", generate_latest(registry))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


class RuntimeCollector(Collector):
    """One look at a runtime."""

    def __init__(self, runtime: Runtime, reports: Sequence[tuple[TenantConfig, Report]]) -> None:
        self._runtime = runtime
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        served = [(self._labels(tenant.name, item), item) for tenant, report in self._reports for item in report.served]
        yield from _counts(served)
        yield from _durations(served)
        yield _histogram(served)
        yield from _failures(served)
        yield _pending(served)
        yield from self._executions()
        yield from self._lanes()
        yield from self._granules()

    def _labels(self, tenant: str, item: Counted) -> list[str]:
        return [item.name, item.version, tenant, self._partition(tenant)]

    def _partition(self, tenant: str) -> str:
        held = self._runtime.manager.held.get(tenant)
        return "-".join(map(str, held.granules)) if held else ""

    def _executions(self) -> Iterator[Metric]:
        """What executors count starts anew when a model is loaded or moved, as counters may."""
        ways = GaugeMetricFamily("greenlane_model_graphs", "1 for the kind of CUDA graph it runs by", labels=[*_OWN, "graphs"])
        families = {name: CounterMetricFamily(*about, labels=_OWN) for name, about in COUNTED.items()}
        for execution in self._runtime.executions():
            labels = [execution.name, execution.version, execution.tenant]
            ways.add_metric([*labels, str(execution.description["graphs"])], 1)
            counts = execution.description.get("counts")
            for name, count in counts.items() if isinstance(counts, dict) else ():
                if name in families:
                    families[name].add_metric(labels, count)
        yield from (ways, *families.values())

    def _lanes(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("greenlane_waiting_requests", "Requests waiting for a credit", labels=["tenant"])
        flying = GaugeMetricFamily("greenlane_in_flight_requests", "Works enqueued and not ended", labels=["tenant"])
        rejected = CounterMetricFamily("greenlane_rejected_requests", "Refused for a full queue or memory", labels=["tenant"])
        expired = CounterMetricFamily("greenlane_expired_requests", "Requests whose timeout passed", labels=["tenant"])
        invalid = CounterMetricFamily("greenlane_invalid_requests", "Refused for what they say themselves", labels=["tenant"])
        memory = GaugeMetricFamily("greenlane_slot_bytes", "Bytes of its memory that requests hold", labels=["tenant"])
        limit = GaugeMetricFamily("greenlane_memory_bytes", "Bytes that requests may hold", labels=["tenant"])
        ages = GaugeMetricFamily(
            "greenlane_report_age_seconds", "0, or since when the tenant's process says nothing", labels=["tenant"]
        )
        for tenant, report in self._reports:
            counts = report.lane
            ages.add_metric([tenant.name], report.age)
            waiting.add_metric([tenant.name], counts.waiting)
            flying.add_metric([tenant.name], counts.in_flight)
            rejected.add_metric([tenant.name], counts.rejected)
            expired.add_metric([tenant.name], counts.expired)
            invalid.add_metric([tenant.name], counts.invalid)
            memory.add_metric([tenant.name], report.slots.nbytes)
            limit.add_metric([tenant.name], tenant.memory)
        yield from (waiting, flying, rejected, expired, invalid, memory, limit, ages)

    def _granules(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("greenlane_partition_granules", "Granules held", labels=["tenant", "partition"])
        for tenant, _ in self._reports:
            partition = self._runtime.manager.held.get(tenant.name)
            held.add_metric([tenant.name, self._partition(tenant.name)], len(partition.granules) if partition else 0)
        yield held
        yield GaugeMetricFamily("greenlane_ready", "1 while new work is welcome", value=float(self._runtime.ready))
        changes = self._runtime.statistics().repartitions
        yield CounterMetricFamily("greenlane_repartitions", "Plans put in force, the first included", value=changes)


def _pending(served: list[tuple[list[str], Counted]]) -> Metric:
    family = GaugeMetricFamily("nv_inference_pending_request_count", "Requests waiting for their turn", labels=_LABELS)
    for labels, item in served:
        family.add_metric(labels, item.pending)
    return family


def _counts(served: list[tuple[list[str], Counted]]) -> Iterator[Metric]:
    success = UnknownMetricFamily("nv_inference_request_success", "Requests answered", labels=_LABELS)
    count = UnknownMetricFamily("nv_inference_count", "Inferences, each row of a batch counted", labels=_LABELS)
    runs = UnknownMetricFamily("nv_inference_exec_count", "Runs of the model", labels=_LABELS)
    for labels, item in served:
        success.add_metric(labels, item.statistics.success.count)
        count.add_metric(labels, item.statistics.inferences)
        runs.add_metric(labels, item.statistics.executions)
    yield from (success, count, runs)


def _durations(served: list[tuple[list[str], Counted]]) -> Iterator[Metric]:
    for name, field in _DURATIONS.items():
        family = UnknownMetricFamily(f"nv_inference_{name}_duration_us", "Microseconds in all", labels=_LABELS)
        for labels, item in served:
            family.add_metric(labels, getattr(item.statistics, field).ns / 1000)
        yield family


def _histogram(served: list[tuple[list[str], Counted]]) -> Metric:
    """Without the partition, so that quantiles over time go on through a repartition."""
    name, about = "greenlane_request_duration_seconds", "From the whole body to the encoded answer, of requests answered"
    family = HistogramMetricFamily(name, about, labels=_LABELS[:-1])
    for labels, item in served:
        family.add_metric(labels[:-1], _buckets(item.statistics), item.statistics.success.ns / 1e9)
    return family


def _buckets(statistics: ModelStatistics) -> list[tuple[str, float]]:
    """As Prometheus has them: each counts what the ones before it do, too."""
    bounds = [*(str(bound / 1e9) for bound in BOUNDS), "+Inf"]
    return list(zip(bounds, accumulate(statistics.buckets), strict=True))


def _failures(served: list[tuple[list[str], Counted]]) -> Iterator[Metric]:
    family = UnknownMetricFamily("nv_inference_request_failure", "Requests refused or failed", labels=[*_LABELS, "reason"])
    for labels, item in served:
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
            family.add_metric([*labels, reason], item.statistics.failures.get(reason, 0))
    yield family
