"""The Open Inference Protocol apart from inference: health, metadata, configuration, statistics, the repository index."""

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.params import Path as PathParameter
from pydantic import Field

from ..errors import Unavailable
from ..http.paths import check_version
from ..protocol.json_document import flag
from ..repository.model_repository import names_for
from ..tenants import answers
from . import schemas
from .body import read_object
from .dependencies import ServiceDep, TenantDep
from .framework import json_response
from .openapi import errors, operation_id, request_body

_SERVER: list[str | Enum] = ["Server"]
_MODELS: list[str | Enum] = ["Models"]
_REPOSITORY: list[str | Enum] = ["Repository"]
_MODEL_ERRORS = errors(400, 401, 404, 421, 503)

ModelName = Annotated[str, PathParameter(description="The model, percent-encoded.")]
ModelVersion = Annotated[str | None, Field(description="The version; the highest that is served if it is left out.")]

router = APIRouter(generate_unique_id_function=operation_id)


def get_or_head(path: str, **documented: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Route GET and HEAD of a path, which load balancers and `curl -I` use, to a function. The document shows GET alone."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        router.head(path, include_in_schema=False)(function)
        router.get(path, **documented)(function)
        return function

    return register


@get_or_head("/v2/", include_in_schema=False)
@get_or_head("/v2", tags=_SERVER, response_model=answers.ServerMetadata, responses=errors())
async def server_metadata() -> Response:
    """Name, version and extensions of the server."""
    return json_response(answers.SERVER)


@get_or_head("/v2/health/live", tags=_SERVER, response_model=schemas.Live, responses=errors())
async def live() -> Response:
    """Whether the server answers."""
    return json_response(schemas.Live(True))


@get_or_head("/v2/health/ready", tags=_SERVER, response_model=schemas.Ready, responses=errors(503))
async def ready(service: ServiceDep) -> Response:
    """Whether the server accepts inferences.

    503 with the reason while it starts (with how many models are ready) or drains, after the device was lost, and, with
    `server.strict_readiness`, while a model of any tenant could not be loaded.
    """
    if why := service.unready:
        raise Unavailable(why)
    return json_response(schemas.Ready(True))


@router.get("/v2/models/stats", tags=_MODELS, response_model=answers.Statistics, responses=errors(400, 401, 421, 503))
async def all_statistics(tenant: TenantDep, service: ServiceDep) -> Response:
    """Counts and times of all models that the tenant is served."""
    return json_response(await service.statistics(tenant.catalog.served()))


@router.get("/v2/models/{name}", tags=_MODELS, response_model=answers.ModelMetadata, responses=_MODEL_ERRORS)
@router.get("/v2/models/{name}/versions/{version}", tags=_MODELS, response_model=answers.ModelMetadata, responses=_MODEL_ERRORS)
async def metadata(tenant: TenantDep, name: ModelName, version: ModelVersion = None) -> Response:
    """A model's inputs, outputs, versions and platform."""
    check_version(version)
    return json_response(tenant.catalog.metadata(name, version))


@get_or_head("/v2/models/{name}/ready", tags=_MODELS, response_model=schemas.ModelReady, responses=_MODEL_ERRORS)
@get_or_head(
    "/v2/models/{name}/versions/{version}/ready", tags=_MODELS, response_model=schemas.ModelReady, responses=_MODEL_ERRORS
)
async def model_ready(tenant: TenantDep, name: ModelName, version: ModelVersion = None) -> Response:
    """Whether a model can be called now; 503 with the reason while inferences for it are."""
    check_version(version)
    return json_response(schemas.ModelReady(tenant.callable(name, version).name, True))


@router.get("/v2/models/{name}/config", tags=_MODELS, response_model=schemas.ModelConfiguration, responses=_MODEL_ERRORS)
@router.get(
    "/v2/models/{name}/versions/{version}/config",
    tags=_MODELS,
    response_model=schemas.ModelConfiguration,
    responses=_MODEL_ERRORS,
)
async def config(tenant: TenantDep, name: ModelName, version: ModelVersion = None) -> Response:
    """A model's whole configuration, in Triton's form.

    `parameters` has `greenlane.execution`: which way the model ran when it was loaded, as JSON in a text.
    """
    check_version(version)
    return json_response(tenant.catalog.find(name, version).config)


@router.get("/v2/models/{name}/stats", tags=_MODELS, response_model=answers.Statistics, responses=_MODEL_ERRORS)
@router.get(
    "/v2/models/{name}/versions/{version}/stats", tags=_MODELS, response_model=answers.Statistics, responses=_MODEL_ERRORS
)
async def statistics(tenant: TenantDep, service: ServiceDep, name: ModelName, version: ModelVersion = None) -> Response:
    """Counts and times of a model, of all its versions unless one is named."""
    check_version(version)
    return json_response(await service.statistics(tenant.catalog.matching(name, version)))


@router.post(
    "/v2/repository/index",
    tags=_REPOSITORY,
    response_model=list[schemas.RepositoryEntry],
    responses=errors(400, 401, 413, 421, 503),
    openapi_extra=request_body(schemas.IndexRequest, {"ready": True}),
)
async def index(tenant: TenantDep, service: ServiceDep, request: Request) -> Response:
    """Every model that the tenant is served or could load, with its state, and the reason where it is not ready."""
    if flag(await read_object(request, tenant.uploads), "ready", ""):
        entries = [entry for entry in tenant.index() if entry.state == "READY"]
    else:
        there = await asyncio.to_thread(names_for, tenant.config, service.config.models.repository)
        entries = tenant.index(there, tenant.config.models)
    return json_response([entry.as_json() for entry in entries])
