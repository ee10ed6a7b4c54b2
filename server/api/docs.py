"""`/openapi.json` and `/docs`: the tenants' API, for everybody. Administration has its own, see `server.admin.docs`."""

from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Response
from fastapi.params import Depends

from . import metadata, model_control, schemas, status_page, text, text_schemas, trace_settings
from .dependencies import tenant
from .metadata import ModelName
from .openapi import Document, describe, errors, operation_id
from .openapi import router as router_of

JSON, PAGE = "/openapi.json", "/docs"

_DESCRIPTION = (
    "The Open Inference Protocol v2 over HTTP, with Triton's extensions. docs/protocol.md has the details.\n\n"
    "Administration is described in `/admin/docs` and `/admin/openapi.json`, for administrators.\n\n"
    "GET routes of `/v2`, health and a model's readiness answer HEAD, too."
)
_TAGS = [
    {"name": "Server", "description": "The server as a whole. No tenant is needed."},
    {"name": "Models", "description": "Models of the tenant that asks."},
    {"name": "Inference", "description": "The hot path."},
    {
        "name": "Texts",
        "description": "Encoder models, as clients of OpenAI's, Cohere's and Jina's APIs ask them (docs/text.md).",
    },
    {"name": "Repository", "description": "Which models the tenant is served."},
]
_BODIES = (
    schemas.IndexRequest,
    schemas.LoadRequest,
    schemas.UnloadRequest,
    text_schemas.EmbeddingsRequest,
    text_schemas.RerankRequest,
)

inference = APIRouter(generate_unique_id_function=operation_id)
"""Describes inference, which `server.http` answers outside of the framework. No application includes it."""


HeaderLength = Annotated[
    int | None, Header(description="Bytes of JSON at the beginning of the body; binary tensors follow. 0: a raw body.")
]
ContentEncoding = Annotated[str | None, Header(description="`gzip`, `deflate` or `identity`, of the whole body.")]
_ERRORS = errors(400, 401, 404, 408, 413, 415, 421, 429, 500, 503, 504)
_TENSORS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}, **_ERRORS}
"""JSON, or JSON that binary tensors follow."""


@inference.post("/v2/models/{name}/infer", tags=["Inference"], dependencies=[Depends(tenant)], responses=_TENSORS)
async def infer(
    name: ModelName,
    body: schemas.InferRequest,
    inference_header_content_length: HeaderLength = None,
    content_encoding: ContentEncoding = None,
) -> schemas.InferResponse:
    """Run the highest version of a model.

    The answer has `Server-Timing` (milliseconds in the queue and in execution), and `Inference-Header-Content-Length` if binary
    tensors follow its JSON. Closing the connection withdraws the request.
    """
    raise AssertionError("this route describes; it is not served")


@inference.post(
    "/v2/models/{name}/versions/{version}/infer", tags=["Inference"], dependencies=[Depends(tenant)], responses=_TENSORS
)
async def infer_of_version(
    name: ModelName,
    version: Annotated[str, Path(description="The version.")],
    body: schemas.InferRequest,
    inference_header_content_length: HeaderLength = None,
    content_encoding: ContentEncoding = None,
) -> schemas.InferResponse:
    """Run a version of a model, as `infer`."""
    raise AssertionError("this route describes; it is not served")


@inference.post("/v2/models/{name}/generate", tags=["Inference"], dependencies=[Depends(tenant)], responses=_ERRORS)
async def generate(
    name: ModelName, body: schemas.GenerateRequest, content_encoding: ContentEncoding = None
) -> schemas.GenerateResponse:
    """Run the highest version of a model, with tensors as members of the request by their names.

    400 for a model whose answer has not exactly one part.
    """
    raise AssertionError("this route describes; it is not served")


@inference.post(
    "/v2/models/{name}/versions/{version}/generate", tags=["Inference"], dependencies=[Depends(tenant)], responses=_ERRORS
)
async def generate_of_version(
    name: ModelName,
    version: Annotated[str, Path(description="The version.")],
    body: schemas.GenerateRequest,
    content_encoding: ContentEncoding = None,
) -> schemas.GenerateResponse:
    """Run a version of a model, as `generate`."""
    raise AssertionError("this route describes; it is not served")


class Events(Response):
    """Server-Sent Events, for the description."""

    media_type = "text/event-stream"


_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": 'Each event is a GenerateResponse as JSON, or `{"error": ...}`, which is the last.'},
    **{status: {"description": said["description"], "content": _ERROR} for status, said in _ERRORS.items()},
}


@inference.post(
    "/v2/models/{name}/generate_stream",
    tags=["Inference"],
    dependencies=[Depends(tenant)],
    responses=_EVENTS,
    response_class=Events,
)
async def generate_stream(name: ModelName, body: schemas.GenerateRequest, content_encoding: ContentEncoding = None) -> Events:
    """Run the highest version of a model, and send each part of the answer when it is there, as a Server-Sent Event.

    An error before the first part is a status; after it, it is an event, and the last one. Closing the connection stops the
    model.
    """
    raise AssertionError("this route describes; it is not served")


@inference.post(
    "/v2/models/{name}/versions/{version}/generate_stream",
    tags=["Inference"],
    dependencies=[Depends(tenant)],
    responses=_EVENTS,
    response_class=Events,
)
async def generate_stream_of_version(
    name: ModelName,
    version: Annotated[str, Path(description="The version.")],
    body: schemas.GenerateRequest,
    content_encoding: ContentEncoding = None,
) -> Events:
    """Run a version of a model, as `generate_stream`."""
    raise AssertionError("this route describes; it is not served")


@cache
def document() -> Document:
    """The tenants' document, computed at the first call."""
    routers = (metadata.router, inference, text.router, model_control.router)
    return describe("Greenlane", _DESCRIPTION, routers, _BODIES, _TAGS, JSON)


router = router_of(document, JSON, PAGE)

ROUTERS = (text.router, metadata.router, model_control.router, router, status_page.router, trace_settings.router)
"""The routes that every form of the server has, in the order in which a request is compared with them: texts come most often.

Those of administration are in `server.admin`.
"""
