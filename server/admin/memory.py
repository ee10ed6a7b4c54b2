"""What each tenant's models take of the device's memory, as JSON and as metrics."""

from collections.abc import Iterator, Sequence

from fastapi import Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..api.framework import json_response
from ..control.descriptions import TenantMemory
from ..protocol.json_document import Object
from . import schemas
from .dependencies import ControllerDep, admin_router

router = admin_router()


@router.get("/memory", response_model=schemas.Memory)
async def memory(controller: ControllerDep) -> Response:
    """What each tenant's models take of the device's memory, and which of them are paged out."""
    return json_response({"tenants": [_tenant(each) for each in await controller.memory()]})


def families(memory: Sequence[TenantMemory]) -> Iterator[Metric]:
    """The metrics of it. Counters begin at 0 again when a tenant's device side does."""
    taken = GaugeMetricFamily(
        "greenlane_model_device_memory_bytes",
        "Bytes of the device's memory that a model takes; none while it is paged out",
        labels=["model", "version", "tenant", "kind"],
    )
    paged = GaugeMetricFamily(
        "greenlane_model_paged_out", "1 for a model that is paged out, else 0", labels=["model", "version", "tenant"]
    )
    used = GaugeMetricFamily("greenlane_device_memory_bytes", "Bytes that the tenant's models take", labels=["tenant"])
    limit = GaugeMetricFamily("greenlane_device_memory_limit_bytes", "Bytes that they may take", labels=["tenant"])
    counters = [
        (CounterMetricFamily("greenlane_page_ins", "Models brought back", labels=["tenant"]), "page_ins"),
        (CounterMetricFamily("greenlane_page_outs", "Models paged out", labels=["tenant"]), "page_outs"),
        (CounterMetricFamily("greenlane_page_in_seconds", "Time that took", labels=["tenant"]), "page_in_seconds"),
        (CounterMetricFamily("greenlane_page_out_seconds", "Time that took", labels=["tenant"]), "page_out_seconds"),
    ]
    for tenant in memory:
        used.add_metric([tenant.tenant], tenant.used)
        if tenant.limit is not None:
            limit.add_metric([tenant.tenant], tenant.limit)
        for family, name in counters:
            family.add_metric([tenant.tenant], getattr(tenant, name))
        for model in tenant.models:
            labels = [model.name, model.version, tenant.tenant]
            paged.add_metric(labels, float(model.paged))
            for kind, nbytes in model.memory.items():
                taken.add_metric([*labels, kind], 0 if model.paged else nbytes)
    yield from (taken, paged, used, limit, *(family for family, _ in counters))


def _tenant(tenant: TenantMemory) -> Object:
    return {
        "name": tenant.tenant,
        "device_memory": tenant.limit,
        "used": tenant.used,
        "page_ins": tenant.page_ins,
        "page_outs": tenant.page_outs,
        "page_in_seconds": round(tenant.page_in_seconds, 3),
        "page_out_seconds": round(tenant.page_out_seconds, 3),
        "models": [
            {"name": each.name, "version": each.version, "paged": each.paged, "bytes": dict(each.memory)}
            for each in tenant.models
        ],
    }
