"""Loading and unloading models: the routes, and all checks that need no device.

They run in the process that serves HTTP for the tenant, at that tenant's expense. In the device's process all tenants share an
interpreter; only a change that passed these checks, and whose turn has come, gets there.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Request, Response

from ..config.schema import ModelOptions
from ..config.tables import dotted
from ..errors import BadRequest, NotFound
from ..protocol.json_document import Object, field, flag, parameters, short
from ..repository.model_config import ConfigRefused, from_json
from ..tenants.service import Tenant
from . import schemas
from .body import read_object
from .dependencies import RequireModelControl, ServiceDep, TenantDep
from .framework import cancel_on_disconnect
from .metadata import ModelName
from .openapi import errors, operation_id, request_body


class ModelControl(Protocol):
    """Who carries out a change that was checked: the runtime of this process, or that of another one."""

    async def load(self, request: Request, tenant: str, name: str, config: str | None) -> Response:
        """Load a model, with this configuration in place of its own if there is one; return the response to the client.

        Raises BadRequest if it cannot be served; the versions that were served go on then.
        """

    async def unload(self, request: Request, tenant: str, name: str) -> Response:
        """Unload a model and return the response to the client."""


async def _control(request: Request) -> ModelControl:
    """The model control of this application."""
    found: ModelControl = request.app.state.model_control
    return found


ModelControlDep = Annotated[ModelControl, Depends(_control)]

router = APIRouter(
    prefix="/v2/repository/models",
    tags=["Repository"],
    dependencies=[RequireModelControl],
    generate_unique_id_function=operation_id,
    responses=errors(400, 401, 404, 413, 421, 429, 500, 503),
)
_DONE: dict[int | str, dict[str, Any]] = {200: {"description": "Done; the body is empty."}}


@router.post(
    "/{name}/load",
    response_class=Response,
    responses=_DONE,
    openapi_extra=request_body(schemas.LoadRequest, {"parameters": {"config": '{"max_batch_size": 8}'}}),
)
async def load(tenant: TenantDep, service: ServiceDep, control: ModelControlDep, request: Request, name: ModelName) -> Response:
    """Load a model, or load it again.

    All or nothing: if a version that is to be served cannot be, the answer is 400 with the reason, and what was served goes on.
    Changes of one tenant are made one after another. One whose client disconnects before its turn is not made.
    """
    with tenant.changes.admitted():
        config = await _checked_config(request, tenant, name, service.config.models.options)
        return await _in_turn(tenant, request, lambda: control.load(request, tenant.name, name, config))


@router.post("/{name}/unload", response_class=Response, responses=_DONE, openapi_extra=request_body(schemas.UnloadRequest, {}))
async def unload(tenant: TenantDep, control: ModelControlDep, request: Request, name: ModelName) -> Response:
    """Unload a model; its requests are 503 from then on."""
    with tenant.changes.admitted():
        flag(parameters(await read_object(request, tenant.uploads)), "unload_dependents")  # There are none.
        return await _in_turn(tenant, request, lambda: control.unload(request, tenant.name, name))


async def _checked_config(request: Request, tenant: Tenant, name: str, options: Mapping[str, ModelOptions]) -> str | None:
    """The configuration in a request to load a model, checked as far as that is possible without the model.

    `options` are those of the server's own configuration, by model. Raises NotFound for a model that the tenant may not call;
    BadRequest for a configuration that is wrong, too large, or overruled by `options`.
    """
    config = config_in(await read_object(request, tenant.uploads))
    if not tenant.config.may_call(name):
        raise NotFound(f"Request for unknown model: {name!r} is not found")
    if config is not None:
        await asyncio.to_thread(check, name, config, options.get(name, ModelOptions()))
    return config


async def _in_turn(tenant: Tenant, request: Request, change: Callable[[], Coroutine[Any, Any, Response]]) -> Response:
    """Make a change when it is this tenant's next, unless the client disconnects before."""

    async def wait() -> Response:
        async with tenant.changes.exclusive():
            return await change()

    return await cancel_on_disconnect(request, wait())


def config_in(asked: Object) -> str | None:
    """The configuration in the body of a load; None if there is none. Raises BadRequest, also for parameters not served."""
    if "config" in asked:
        raise BadRequest("config: stands beside 'parameters', where it means nothing; send it as parameters.config")
    if isinstance(given := asked.get("parameters"), dict) and isinstance(given.get("config"), dict):
        raise BadRequest("parameters.config: an object; expected a text that holds its JSON, as Triton's clients send it")
    values = parameters(asked)
    if unserved := [key for key in values if key != "config"]:
        where = f"parameters.{short(unserved[0])}"
        if get_close_matches(unserved[0], ["config"]):
            raise BadRequest(f"{where}: there is no such parameter; did you mean 'config'?")
        raise BadRequest(f"{where}: failed to load: put files into the repository; only 'config' is taken")
    config: str | None = field(values, "config", str, "parameters.")
    return config


def check(name: str, config: str, options: ModelOptions) -> None:
    """Raise BadRequest for a configuration that is wrong, or that the server's own overrules. Blocks for up to 20 ms."""
    try:
        stated = from_json(config)
    except ConfigRefused as error:
        raise BadRequest(f"failed to load {name!r}: {error}") from error
    batch_delay, preferred_batches = stated.batch_delay or None, stated.preferred_batches or None
    batching = "dynamic_batching"
    both = (
        ("max_batch_size", stated.stated_max_batch, options.max_batch, "max_batch"),
        (f"{batching}.max_queue_delay_microseconds", batch_delay, options.batch_delay, "batch_delay"),
        (f"{batching}.preferred_batch_size", preferred_batches, options.preferred_batches, "preferred_batches"),
    )
    for key, requested, configured, setting in both:
        if requested is not None and configured is not None and requested != configured:
            why = f"{dotted(('models', name, setting))} in the server's configuration overrules it; leave it out"
            raise BadRequest(f"failed to load {name!r}: {stated.source}: {key} would mean nothing: {why}")
