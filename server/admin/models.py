"""Loads and unloads that `server.api.model_control` has checked, carried out by the process that owns the device."""

from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from ..api.body import read_object
from ..api.dependencies import RequireModelControl, ServiceDep, TenantConfigDep
from ..api.model_control import config_in
from ..control.controller import Controller
from .dependencies import ControllerDep


class LocalModelControl:
    """Makes changes where the routes are: in a server of one process.

    `controller` raises Unavailable while the server starts.
    """

    def __init__(self, controller: Callable[[], Controller]) -> None:
        self._controller = controller

    def __repr__(self) -> str:
        return "<LocalModelControl>"

    async def load(self, request: Request, tenant: str, name: str, config: str | None) -> Response:
        await self._controller().load(tenant, name, config)
        return Response()

    async def unload(self, request: Request, tenant: str, name: str) -> Response:
        await self._controller().unload(tenant, name)
        return Response()


forwarded = APIRouter(dependencies=[RequireModelControl], include_in_schema=False)
"""Changes that a tenant's HTTP process forwards. It has checked their configuration; whose they are is checked again."""


@forwarded.post("/v2/repository/models/{name}/load")
async def load(
    tenant: TenantConfigDep, service: ServiceDep, controller: ControllerDep, request: Request, name: str
) -> Response:
    await controller.load(tenant.name, name, config_in(await read_object(request, service.uploads)))
    return Response()


@forwarded.post("/v2/repository/models/{name}/unload")
async def unload(tenant: TenantConfigDep, controller: ControllerDep, name: str) -> Response:
    await controller.unload(tenant.name, name)
    return Response()
