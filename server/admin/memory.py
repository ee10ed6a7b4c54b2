"""What each tenant's models take of the device's memory, as JSON and as metrics."""

from collections.abc import Iterator, Sequence

from fastapi import Response
from prometheus_client.core import Metric

from ..api.framework import json_response
from ..control.descriptions import TenantMemory
from . import schemas
from .dependencies import ControllerDep, admin_router
from .exposition import counter, gauge

router = admin_router()

_COUNTERS = {
    "greenlane_page_ins": "Models brought back",
    "greenlane_page_outs": "Models paged out",
    "greenlane_page_in_seconds": "Time that took",
    "greenlane_page_out_seconds": "Time that took",
}


@router.get("/memory", response_model=schemas.Memory)
async def memory(controller: ControllerDep) -> Response:
    """What each tenant's models take of the device's memory, and which of them are paged out."""
    return json_response(schemas.Memory(await controller.memory()))


def families(memory: Sequence[TenantMemory]) -> Iterator[Metric]:
    """The metrics of it. Counters begin at 0 again when a tenant's device side does."""
    models = [([model.name, model.version, each.tenant], model) for each in memory for model in each.models]
    yield gauge(
        "greenlane_model_device_memory_bytes",
        "Bytes of the device's memory that a model takes; none while it is paged out",
        ["model", "version", "tenant", "kind"],
        (([*labels, kind], 0 if model.paged else nbytes) for labels, model in models for kind, nbytes in model.memory.items()),
    )
    paged = ((labels, float(model.paged)) for labels, model in models)
    yield gauge("greenlane_model_paged_out", "1 for a model that is paged out, else 0", ["model", "version", "tenant"], paged)
    used = (([each.tenant], each.used) for each in memory)
    yield gauge("greenlane_device_memory_bytes", "Bytes that the tenant's models take", ["tenant"], used)
    limits = (([each.tenant], each.limit) for each in memory if each.limit is not None)
    yield gauge("greenlane_device_memory_limit_bytes", "Bytes that they may take", ["tenant"], limits)
    for name, about in _COUNTERS.items():
        rows = (([each.tenant], getattr(each, name.removeprefix("greenlane_"))) for each in memory)
        yield counter(name, about, ["tenant"], rows)
