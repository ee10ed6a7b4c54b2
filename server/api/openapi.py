"""OpenAPI documents of routers: the errors, request bodies and texts that FastAPI cannot see for itself.

A document is computed once per process, before it serves, as that takes the interpreter for up to 0.1 s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Response
from fastapi.openapi.utils import get_openapi
from fastapi.params import Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .. import __version__
from ..facts import Fact
from .docs_page import render
from .schemas import Error

_TEXT = {"type": "string"}
_STATUSES: dict[int, tuple[str, dict[str, str]]] = {
    400: ("The request is wrong; the text names the field, what came and what was expected.", {}),
    401: ("No key, a wrong key, or no such tenant.", {"WWW-Authenticate": "Bearer"}),
    404: ("There is no such model or version, or it is not this tenant's.", {}),
    405: ("Another method is expected.", {"Allow": "The methods that this path has."}),
    408: ("The body took too long to arrive; the connection is closed.", {}),
    409: ("It does not fit what is there, such as the free granules; nothing has changed.", {}),
    413: ("The body is over a limit.", {}),
    415: ("This Content-Encoding is not served.", {"Accept-Encoding": "Those that are."}),
    421: ("The connection belongs to another tenant; send the request on a new one.", {}),
    429: ("Too many requests wait, or they hold too much memory.", {"Retry-After": "Seconds."}),
    500: ("The model or the server failed.", {"X-Request-Id": "As in the text, and in the server's log."}),
    503: ("The server or the model is not ready, or drains.", {"Retry-After": "Seconds."}),
    504: ("The request's own timeout passed.", {}),
}

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int, model: type[Fact] = Error) -> Responses:
    """`responses` of a route that may answer these errors, in this form; `default` keeps FastAPI from adding its 422, which is
    400 here.
    """
    found: Responses = {}
    for status in statuses:
        description, headers = _STATUSES[status]
        fields = {name: {"description": text, "schema": _TEXT} for name, text in headers.items()}
        found[status] = {"model": model, "description": description, **({"headers": fields} if fields else {})}
    return {**found, "default": {"model": model, "description": "Any other error."}}


def request_body(model: type[BaseModel], example: Any, required: bool = False) -> dict[str, Any]:
    """`openapi_extra` of a route that reads a body of this model; the model must also be among the `bodies` of `describe`."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema, "example": example}}}}


def operation_id(route: APIRoute) -> str:
    """The name of a route's function, which is unique but for the routes of a model and of a version of it."""
    suffix = "_of_version"
    return f"{route.name.removesuffix(suffix)}{suffix}" if "{version}" in route.path_format else route.name


@dataclass(frozen=True, slots=True)
class Document:
    """An OpenAPI document as it is sent, and the same for people."""

    json: bytes
    page: bytes


def describe(
    title: str,
    description: str,
    routers: Sequence[APIRouter],
    bodies: Sequence[type[BaseModel]],
    tags: Sequence[dict[str, str]],
    json_path: str,
) -> Document:
    """The document of these routers. `bodies` are the models of `request_body`; `json_path` is where the JSON is served."""
    routes = [route for router in routers for route in router.routes]
    found = get_openapi(title=title, version=__version__, description=description, routes=routes, tags=list(tags))
    for operation in (each for methods in found["paths"].values() for each in methods.values()):
        _complete(operation)
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}")
    schemas = found["components"]["schemas"] | definitions["$defs"]
    found["components"]["schemas"] = {name: schemas[name] for name in sorted(schemas)}
    return Document(orjson.dumps(found), render(found, json_path).encode())


def _complete(operation: dict[str, Any]) -> None:
    """The first paragraph of a route's docstring is its summary. Credentials may be left out, see `dependencies`."""
    operation["summary"], _, rest = operation["description"].partition("\n\n")
    operation["description"] = rest
    if "security" in operation:
        operation["security"].append({})


_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


def router(document: Callable[[], Document], json_path: str, page_path: str, dependencies: Sequence[Depends] = ()) -> APIRouter:
    """The two routes that serve a document. `document` is cached."""
    routes = APIRouter(dependencies=list(dependencies), include_in_schema=False)

    @routes.get(json_path)
    async def openapi() -> Response:
        return Response(document().json, media_type="application/json")

    @routes.get(page_path)
    async def page() -> Response:
        return Response(document().page, media_type="text/html", headers=_HEADERS)

    return routes
