"""Loads and unloads, carried out by the process that has the controller: those of administrators, and those of tenants, which
`server.api.model_control` has checked.
"""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from ..api.body import read_object
from ..api.dependencies import RequireModelControl, ServiceDep, TenantConfigDep
from ..api.framework import json_response
from ..api.model_control import config_in
from ..api.openapi import errors
from ..config.tables import dotted
from ..control.controller import Controller
from ..errors import BadRequest, NotFound
from . import schemas
from .dependencies import ControllerDep, admin_router

router = admin_router()
TenantName = Annotated[str, Path(description="The tenant's name.")]
ModelName = Annotated[str, Path(description="The model, percent-encoded.")]


@router.post("/tenants/{tenant}/models/{name}/load", response_model=schemas.ChangedModel, responses=errors(404, 500))
async def load_for(
    controller: ControllerDep, service: ServiceDep, request: Request, tenant: TenantName, name: ModelName
) -> Response:
    """Load a model for a tenant, or load it again.

    All or nothing: if a version that is to be served cannot be, the answer is 400 with the reason, and what was served goes on.
    Tenants load their own models by `POST /v2/repository/models/NAME/load`.
    """
    _check(controller, tenant, name)
    if config_in(await read_object(request, service.uploads)) is not None:
        raise BadRequest("parameters.config: expected none: administrators load what the repository has, tenants may send one")
    await controller.load(tenant, name)
    return json_response(schemas.ChangedModel(tenant, name))


@router.post("/tenants/{tenant}/models/{name}/unload", response_model=schemas.ChangedModel, responses=errors(404, 500))
async def unload_for(controller: ControllerDep, tenant: TenantName, name: ModelName) -> Response:
    """Unload a model of a tenant; its requests are 503 from then on."""
    _check(controller, tenant, name)
    await controller.unload(tenant, name)
    return json_response(schemas.ChangedModel(tenant, name))


def _check(controller: Controller, tenant: str, model: str) -> None:
    """Raises NotFound."""
    if tenant not in controller.tenants:
        raise NotFound(f"{tenant}: there is no such tenant; there are {', '.join(controller.tenants)}")
    if not controller.tenants[tenant].may_call(model):
        raise NotFound(f"{dotted(('tenants', tenant, 'models'))} does not name {model!r}")


class LocalModelControl:
    """Makes changes where the routes are: in a server of one process.

    `controller` raises Unavailable while the server starts.
    """

    def __init__(self, controller: Callable[[], Controller]) -> None:
        self._controller = controller

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
