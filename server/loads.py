"""Loading and unloading models while serving: what a tenant may ask of the device side."""

from fastapi import APIRouter, Request, Response

from .caller import TheAsker, TheRuntime
from .errors import BadRequest
from .protocol.document import field, parameters, short
from .routes import document

router = APIRouter()


@router.post("/v2/repository/models/{name}/load")
async def load(asker: TheAsker, runtime: TheRuntime, request: Request, name: str) -> Response:
    values = parameters(await document(request))
    if unserved := [key for key in values if key != "config"]:
        where = f"parameters.{short(unserved[0])}"
        raise BadRequest(f"{where}: failed to load: put files into the repository; only 'config' is taken")
    await runtime.load(asker.name, name, field(values, "config", str, "parameters."))
    return Response(status_code=200)


@router.post("/v2/repository/models/{name}/unload")
async def unload(asker: TheAsker, runtime: TheRuntime, request: Request, name: str) -> Response:
    parameters(await document(request))
    await runtime.unload(asker.name, name)
    return Response(status_code=200)
