"""Metrics of tenants that lend and borrow, where there are any."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..config.tenant import TenantConfig
from ..control.stretch import WideState
from ..tenants.frontend import Report


def families(reports: Sequence[tuple[TenantConfig, Report]], states: Sequence[WideState]) -> Iterator[Metric]:
    """`reports` are those of all tenants, `states` their wide partitions."""
    lenders = [(tenant.name, report.lending) for tenant, report in reports if report.lending]
    if lenders:
        lends = GaugeMetricFamily("greenlane_lends", "1 while others may use its granules when it is idle", labels=["tenant"])
        stops = CounterMetricFamily(
            "greenlane_lending_stops", "Times it stopped lending as that cost it too much latency", labels=["tenant"]
        )
        for name, (now, count) in lenders:
            lends.add_metric([name], now)
            stops.add_metric([name], count)
        yield from (lends, stops)
    if states:
        launches = CounterMetricFamily("greenlane_wide_launches", "Inferences on granules of others too", labels=["tenant"])
        returns = CounterMetricFamily(
            "greenlane_wide_returns", "Those of them during which a lender had a request again", labels=["tenant"]
        )
        home = CounterMetricFamily(
            "greenlane_home_launches",
            "Inferences of a tenant with a wide partition that stayed on its own granules, by why",
            labels=["tenant", "reason"],
        )
        for state in states:
            for reason, count in state.home_launches.items():
                home.add_metric([state.tenant, reason], count)
            launches.add_metric([state.tenant], state.launches)
            returns.add_metric([state.tenant], state.returns)
        yield from (launches, returns, home)
