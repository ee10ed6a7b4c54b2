"""Loading and unloading models while serving: the routes of the process that owns the device.

A tenant's own process has checked what it passes on (`server.api.model_control`); a server of one process checks it here.
"""

from fastapi import APIRouter, Request, Response

from ..api.dependencies import IsChanger, TheAsker, TheService
from ..api.metadata import document
from ..api.model_control import config_in, config_of, in_turn
from ..device.runtime import Runtime
from ..protocol.json_document import parameters
from .dependencies import TheRuntime

router = APIRouter()


@router.post("/v2/repository/models/{name}/load", dependencies=[IsChanger])
async def load(asker: TheAsker, service: TheService, runtime: TheRuntime, request: Request, name: str) -> Response:
    tenant = service.tenants.get(asker.name)
    if tenant is None:  # The tenant's own process sent it when its turn had come, and has checked it.
        return await _load(runtime, asker.name, name, config_in(await document(request)))
    with tenant.changes.place():
        config = await config_of(request, asker, name, runtime.config.models.options)
        return await in_turn(tenant, request, lambda: _load(runtime, asker.name, name, config))


@router.post("/v2/repository/models/{name}/unload", dependencies=[IsChanger])
async def unload(asker: TheAsker, service: TheService, runtime: TheRuntime, request: Request, name: str) -> Response:
    tenant = service.tenants.get(asker.name)
    if tenant is None:
        return await _unload(runtime, asker.name, name)
    with tenant.changes.place():
        parameters(await document(request))
        return await in_turn(tenant, request, lambda: _unload(runtime, asker.name, name))


async def _load(runtime: Runtime, tenant: str, name: str, config: str | None) -> Response:
    await runtime.load(tenant, name, config)
    return Response(status_code=200)


async def _unload(runtime: Runtime, tenant: str, name: str) -> Response:
    await runtime.unload(tenant, name)
    return Response(status_code=200)
