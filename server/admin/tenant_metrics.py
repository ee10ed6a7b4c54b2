"""Metrics of what a tenant has in the configuration: limits, weights of versions, lending, a target."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from ..config.tenant import TenantConfig
from ..control.fence import FencedTenant
from ..control.stretch import WidePartition
from ..scheduling.limits import LIMITS
from ..tenants.frontend import Report
from .exposition import Rows, counter, gauge

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
