"""Loading and unloading models while serving: what a tenant may ask of the device side."""

import asyncio

from fastapi import APIRouter, Request, Response

from .caller import TheAsker, TheRuntime
from .config import ModelOptions
from .errors import BadRequest
from .modelconfig import ConfigRefused, from_json
from .protocol.document import field, parameters, short
from .routes import document
from .tables import dotted

router = APIRouter()


@router.post("/v2/repository/models/{name}/load")
async def load(asker: TheAsker, runtime: TheRuntime, request: Request, name: str) -> Response:
    values = parameters(await document(request))
    if unserved := [key for key in values if key != "config"]:
        where = f"parameters.{short(unserved[0])}"
        raise BadRequest(f"{where}: failed to load: put files into the repository; only 'config' is taken")
    config = field(values, "config", str, "parameters.")
    options = runtime.config.models.options.get(name)
    if config is not None and options and asker.may_call(name):
        await asyncio.to_thread(_check, name, config, options)
    await runtime.load(asker.name, name, config)
    return Response(status_code=200)


@router.post("/v2/repository/models/{name}/unload")
async def unload(asker: TheAsker, runtime: TheRuntime, request: Request, name: str) -> Response:
    parameters(await document(request))
    await runtime.unload(asker.name, name)
    return Response(status_code=200)


def _check(name: str, config: str, options: ModelOptions) -> None:
    """Raise BadRequest where a configuration says what the server's own overrules, so that it would mean nothing. Blocks."""
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
