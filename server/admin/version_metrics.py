"""Prometheus metrics of versions that share requests by weights."""

from collections.abc import Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily

from ..config.tenant import TenantConfig
from ..tenants.frontend import Report

Weights = Mapping[str, Mapping[str, float]]
"""Of versions, by model; see `Config.version_weights`."""


def family(by_tenant: Mapping[str, Weights], reports: Sequence[tuple[TenantConfig, Report]]) -> GaugeMetricFamily:
    """The share of each version that is served, of models with weights."""
    about = "Part of the requests without a version that this version gets, by its weight"
    found = GaugeMetricFamily("greenlane_version_share_ratio", about, labels=["model", "version", "tenant"])
    for tenant, report in reports:
        weights = by_tenant.get(tenant.name, {})  # It may have gone since it was asked for its report.
        served = [(item.name, item.version) for item in report.served if item.name in weights]
        for name, version in served:
            whole = sum(weights[name].get(other, 0.0) for model, other in served if model == name)
            if whole:
                found.add_metric([name, version, tenant.name], weights[name].get(version, 0.0) / whole)
    return found
