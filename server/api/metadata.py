"""The Open Inference Protocol apart from inference: health, metadata, configuration, statistics, the repository."""

import asyncio
from contextlib import suppress
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from starlette.requests import ClientDisconnect

from engines import TensorSpec

from .. import __version__
from ..config.schema import TenantConfig
from ..errors import ClientGone, NotFound, TooLarge, Unavailable
from ..http.body import content_length
from ..protocol.json_document import Object, flag, parse, short
from ..repository.model_repository import Repository
from ..tenants.catalog import Served
from ..tenants.service import Tenant
from .dependencies import TheService, TheTenant, uploads

EXTENSIONS = [
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
]
_MAX_BODY = 1 << 20
_GLANCE = ["GET", "HEAD"]
"""The methods of what load balancers and `curl -I` look at."""

router = APIRouter()


@router.api_route("/", methods=_GLANCE, response_class=HTMLResponse)
async def status_page(service: TheService) -> str:
    """For people who open the address in a browser; it says nothing that health does not say to everybody."""
    links = "".join(f'<li><a href="{path}">{path}</a></li>' for path in ("/v2", "/v2/health/live", "/v2/health/ready"))
    title, state = f"Greenlane {__version__}", service.unready or "the server is ready"
    return f"<!doctype html><html lang=en><title>{title}</title><h1>{title}</h1><p>{state}.</p><ul>{links}</ul></html>\n"


@router.api_route("/v2", methods=_GLANCE)
@router.api_route("/v2/", methods=_GLANCE)
async def server_metadata() -> Object:
    return {"name": "greenlane", "version": __version__, "extensions": EXTENSIONS}


@router.api_route("/v2/health/live", methods=_GLANCE)
async def live() -> Object:
    return {"live": True}


@router.api_route("/v2/health/ready", methods=_GLANCE)
async def ready(service: TheService) -> Object:
    if why := service.unready:
        raise Unavailable(why)
    return {"ready": True}


@router.get("/v2/models/stats")
async def all_statistics(tenant: TheTenant) -> Object:
    return {"model_stats": [_statistics(served) for served in tenant.catalog.served()]}


@router.get("/v2/models/{name}")
@router.get("/v2/models/{name}/versions/{version}")
async def metadata(tenant: TheTenant, name: str, version: str | None = None) -> Object:
    served = _find(tenant, name, version)
    return {
        "name": served.name,
        "versions": tenant.catalog.versions(name)[::-1],
        "platform": served.platform,
        "inputs": [_tensor(spec) for spec in served.signature.inputs],
        "outputs": [_tensor(spec) for spec in served.signature.outputs],
    }


@router.api_route("/v2/models/{name}/ready", methods=_GLANCE)
@router.api_route("/v2/models/{name}/versions/{version}/ready", methods=_GLANCE)
async def model_ready(tenant: TheTenant, name: str, version: str | None = None) -> Object:
    return {"name": _find(tenant, name, version).name, "ready": True}


@router.get("/v2/models/{name}/config")
@router.get("/v2/models/{name}/versions/{version}/config")
async def config(tenant: TheTenant, name: str, version: str | None = None) -> Object:
    return _find(tenant, name, version).config


@router.get("/v2/models/{name}/stats")
@router.get("/v2/models/{name}/versions/{version}/stats")
async def statistics(tenant: TheTenant, name: str, version: str | None = None) -> Object:
    first = _find(tenant, name, version)
    found = [first] if version else [s for s in tenant.catalog.served() if s.name == name]
    return {"model_stats": [_statistics(served) for served in found]}


@router.post("/v2/repository/index")
async def index(tenant: TheTenant, service: TheService, request: Request) -> list[dict[str, str]]:
    if flag(await document(request), "ready", ""):
        return [entry.as_json() for entry in tenant.catalog.index() if entry.state == "READY"]
    there = await asyncio.to_thread(_models_there, tenant.config, service.config.models.repository)
    return [entry.as_json() for entry in tenant.catalog.index(there, tenant.config.models)]


def _models_there(tenant: TenantConfig, repository: Path) -> list[str] | None:
    """The models in the repository that a tenant may call; None where it cannot be read. Blocks."""
    with suppress(OSError):
        return [name for name in Repository(repository, {}).names() if tenant.may_call(name)]
    return None


async def document(request: Request) -> Object:
    """The JSON object of a request, which may be absent. Raises BadRequest, or TooLarge over 1 MiB."""
    body = await body_of(request)
    return parse(body, tensors=False) if body.strip() else {}


async def body_of(request: Request) -> bytes:
    """A request's body. Raises TooLarge over 1 MiB, QueueFull, TooSlow or Unavailable while it is on its way, ClientGone."""
    length = content_length(request.headers.get("content-length"))
    body = bytearray()
    with uploads(request).expect(min(length, _MAX_BODY)) as upload:
        try:
            async for chunk in request.stream():
                upload.grow(len(chunk))
                body += chunk
                if max(length, len(body)) > _MAX_BODY:
                    raise TooLarge(f"a body of more than {_MAX_BODY} bytes, which is the limit here")
        except ClientDisconnect:
            raise ClientGone("the client closed its connection before the body was whole") from None
    return bytes(body)


def _find(tenant: Tenant, name: str, version: str | None) -> Served:
    if version is not None and not (version.isascii() and version.isdigit()):
        raise NotFound(f"version {short(version)!r} is no number; expected digits")
    return tenant.catalog.find(name, version)


def _statistics(served: Served) -> Object:
    return {"name": served.name, "version": served.version, **served.statistics.as_json()}


def _tensor(spec: TensorSpec) -> Object:
    return {"name": spec.name, "datatype": spec.datatype.name, "shape": list(spec.shape)}
