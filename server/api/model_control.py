"""What a request to load or unload a model says, checked in the process that speaks HTTP with the tenant, at its expense.

In the device's process all tenants share an interpreter; only what passed here goes there.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from difflib import get_close_matches
from typing import Any

from fastapi import Request, Response

from ..config.schema import ModelOptions, TenantConfig
from ..config.tables import dotted
from ..errors import BadRequest, NotFound
from ..protocol.json_document import Object, field, parameters, short
from ..repository.model_config import ConfigRefused, from_json
from ..tenants.service import Tenant
from .framework import while_there
from .metadata import document


async def config_of(request: Request, tenant: TenantConfig, name: str, options: Mapping[str, ModelOptions]) -> str | None:
    """The configuration that a request to load a model brings, if it does. `options` are the server's own, by model.

    It is checked as far as that can be done without the model. Raises NotFound for a model that is not the tenant's, BadRequest
    for a configuration that cannot be followed, that says what the server's own overrules, or that is too large.
    """
    config = config_in(await document(request))
    if not tenant.may_call(name):
        raise NotFound(f"Request for unknown model: {name!r} is not found")
    if config is not None:
        await asyncio.to_thread(check, name, config, options.get(name, ModelOptions()))
    return config


async def in_turn(tenant: Tenant, request: Request, change: Callable[[], Coroutine[Any, Any, Response]]) -> Response:
    """Make a change when its turn has come, unless the client goes away before."""

    async def wait() -> Response:
        async with tenant.changes.turn():
            return await change()

    return await while_there(request, wait())


def config_in(asked: Object) -> str | None:
    """The configuration in a request's body. Raises BadRequest, also for parameters that are not served."""
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
    """Raise BadRequest for a configuration that cannot be followed, or says what the server's own overrules. Blocks."""
    try:
        stated = from_json(config)
    except ConfigRefused as error:
        raise BadRequest(f"failed to load {name!r}: {error}") from error
    ours = {
        "max_batch_size": (stated.stated_max_batch, options.max_batch, "max_batch"),
        "dynamic_batching.max_queue_delay_microseconds": (stated.batch_delay or None, options.batch_delay, "batch_delay"),
        "dynamic_batching.preferred_batch_size": (
            stated.preferred_batches or None,
            options.preferred_batches,
            "preferred_batches",
        ),
    }
    for key, (said, counts, setting) in ours.items():
        if said is not None and counts is not None and said != counts:
            why = f"{dotted(('models', name, setting))} in the server's configuration overrules it; leave it out"
            raise BadRequest(f"failed to load {name!r}: {stated.source}: {key} would mean nothing: {why}")
