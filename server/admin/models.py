"""Loads and unloads that `server.api.model_control` has checked, carried out by the process that owns the device."""

from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from ..api.body import read_object
from ..api.dependencies import RequireModelControl, ServiceDep, TenantConfigDep
from ..api.model_control import config_in
from ..device.runtime import Runtime
from .dependencies import RuntimeDep


class LocalModelControl:
    """Makes changes where the routes are: in a server of one process. `runtime` raises Unavailable while the server starts."""

    def __init__(self, runtime: Callable[[], Runtime]) -> None:
        self._runtime = runtime

    def __repr__(self) -> str:
        return "<LocalModelControl>"

    async def load(self, request: Request, tenant: str, name: str, config: str | None) -> Response:
        await self._runtime().load(tenant, name, config)
        return Response()

    async def unload(self, request: Request, tenant: str, name: str) -> Response:
        await self._runtime().unload(tenant, name)
        return Response()


forwarded = APIRouter(dependencies=[RequireModelControl], include_in_schema=False)
"""Changes that a tenant's HTTP process forwards. It has checked their configuration; whose they are is checked again."""


@forwarded.post("/v2/repository/models/{name}/load")
async def load(tenant: TenantConfigDep, service: ServiceDep, runtime: RuntimeDep, request: Request, name: str) -> Response:
    await runtime.load(tenant.name, name, config_in(await read_object(request, service.uploads)))
    return Response()


@forwarded.post("/v2/repository/models/{name}/unload")
async def unload(tenant: TenantConfigDep, runtime: RuntimeDep, name: str) -> Response:
    await runtime.unload(tenant.name, name)
    return Response()
