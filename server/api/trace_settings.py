"""Triton's trace settings, as far as they mean the same here: they say what `server.tracing_*` configures, no more."""

from fastapi import APIRouter, Request, Response

from ..config.server import ServerConfig
from ..errors import BadRequest
from ..protocol.json_document import Object, show
from ..tenants.uploads import Uploads
from .body import read_object
from .dependencies import RequireAdmin, ServiceDep, TenantDep
from .framework import json_response
from .metadata import ModelName
from .openapi import operation_id

router = APIRouter(include_in_schema=False, generate_unique_id_function=operation_id)

_INSTEAD = {
    "trace_level": "set or leave out server.tracing_endpoint",
    "trace_rate": "set server.tracing_ratio",
    "trace_mode": "spans are sent to server.tracing_endpoint",
    "trace_file": "spans are sent to server.tracing_endpoint, never written to a file",
    "trace_count": "all sampled requests are traced",
    "log_frequency": "spans are sent as OTEL_BSP_SCHEDULE_DELAY says",
}
"""What to do in place of changing a setting."""


@router.get("/v2/trace/setting")
async def setting(service: ServiceDep) -> Response:
    """How requests are traced, in Triton's words."""
    return json_response(_settings(service.config.server))


@router.post("/v2/trace/setting", dependencies=[RequireAdmin])
async def change(service: ServiceDep, request: Request) -> Response:
    """The same; refuses settings that differ from those that are."""
    return await _unchanged(service.config.server, request, service.uploads)


@router.get("/v2/models/{name}/trace/setting")
async def setting_of_model(tenant: TenantDep, service: ServiceDep, name: ModelName) -> Response:
    """Those of a model, which are the server's."""
    tenant.catalog.find(name)
    return json_response(_settings(service.config.server))


@router.post("/v2/models/{name}/trace/setting")
async def change_of_model(tenant: TenantDep, service: ServiceDep, request: Request, name: ModelName) -> Response:
    """The same; refuses settings that differ from those that are."""
    tenant.catalog.find(name)
    return await _unchanged(service.config.server, request, tenant.uploads)


async def _unchanged(config: ServerConfig, request: Request, uploads: Uploads) -> Response:
    """Raises BadRequest for a change."""
    settings = _settings(config)
    for name, value in (await read_object(request, uploads)).items():
        if name not in settings:
            raise BadRequest(f"{name}: there is no such trace setting; there are {', '.join(settings)}")
        if value is not None and value != settings[name]:
            raise BadRequest(f"{name}: {show(value)}; it is {show(settings[name])}, and is not changed while serving: "
                             f"{_INSTEAD[name]}, and restart the server")  # fmt: skip
    return json_response(settings)


def _settings(config: ServerConfig) -> Object:
    """Triton writes numbers as texts; a rate of N means that every Nth request is traced."""
    traces = config.tracing_endpoint is not None and config.tracing_ratio > 0
    return {
        "trace_level": ["TIMESTAMPS"] if traces else ["OFF"],
        "trace_rate": str(round(1 / config.tracing_ratio)) if config.tracing_ratio else "0",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "opentelemetry",
    }
