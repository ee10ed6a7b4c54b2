"""Prometheus metrics of versions that share requests by weights."""

from collections.abc import Sequence

from prometheus_client.core import GaugeMetricFamily

from ..config.schema import Config
from ..config.tenant import TenantConfig
from ..tenants.frontend import Report


def family(config: Config, reports: Sequence[tuple[TenantConfig, Report]]) -> GaugeMetricFamily:
    """The share of each version that is served, of models with weights."""
    about = "Part of the requests without a version that this version gets, by its weight"
    found = GaugeMetricFamily("greenlane_version_share_ratio", about, labels=["model", "version", "tenant"])
    for tenant, report in reports:
        weights = config.version_weights(tenant.name)
        served = [(item.name, item.version) for item in report.served if item.name in weights]
        for name, version in served:
            whole = sum(weights[name].get(other, 0.0) for model, other in served if model == name)
            if whole:
                found.add_metric([name, version, tenant.name], weights[name].get(version, 0.0) / whole)
    return found
