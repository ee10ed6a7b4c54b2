"""Prometheus metrics of tenants' limits."""

from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily

from ..config.tenant import TenantConfig
from ..scheduling.limits import LIMITS
from ..tenants.frontend import Report


def family(reports: Sequence[tuple[TenantConfig, Report]]) -> CounterMetricFamily:
    """Refusals for each limit of each tenant, by its key in the configuration."""
    about = "Requests refused with 429 for one of the tenant's limits"
    found = CounterMetricFamily("greenlane_limited_requests", about, labels=["tenant", "limit"])
    for tenant, report in reports:
        for limit, count in zip(LIMITS, report.lane.limited, strict=True):
            found.add_metric([tenant.name, limit], count)
    return found
