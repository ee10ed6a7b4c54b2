"""/openapi.json and /docs are the same from every way to serve, and the server answers as they describe."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter

from server.admin import docs as admin_docs
from server.api import docs, metadata, model_control, schemas, text, text_schemas
from server.api.openapi import Document, operation_id
from tests import encoders

from .harness import configuration, serving
from .wire import SMALL, client

PUBLIC = (metadata.router, model_control.router, docs.inference, text.router)
DOCUMENTS = {"/openapi.json": docs.document(), "/admin/openapi.json": admin_docs.document()}
PAGES = {"/docs": docs.document(), "/admin/docs": admin_docs.document()}
MODEL = "/v2/models/identity"
INFERENCE = json.dumps(SMALL).encode()
REQUESTS: dict[str, tuple[str, str, bytes]] = {
    "server_metadata": ("GET", "/v2", b""),
    "live": ("GET", "/v2/health/live", b""),
    "ready": ("GET", "/v2/health/ready", b""),
    "infer": ("POST", f"{MODEL}/infer", INFERENCE),  # First, so that there is something to count.
    "infer_of_version": ("POST", f"{MODEL}/versions/1/infer", INFERENCE.replace(b"{", b'{"id": "7", ', 1)),
    "generate": ("POST", f"{MODEL}/generate", b'{"x": [1]}'),
    "generate_of_version": ("POST", f"{MODEL}/versions/1/generate", b'{"x": [1]}'),
    "generate_stream": ("POST", f"{MODEL}/generate_stream", b'{"x": [1]}'),
    "generate_stream_of_version": ("POST", f"{MODEL}/versions/1/generate_stream", b'{"x": [1]}'),
    "all_statistics": ("GET", "/v2/models/stats", b""),
    "metadata": ("GET", MODEL, b""),
    "metadata_of_version": ("GET", f"{MODEL}/versions/1", b""),
    "model_ready": ("GET", f"{MODEL}/ready", b""),
    "model_ready_of_version": ("GET", f"{MODEL}/versions/1/ready", b""),
    "config": ("GET", f"{MODEL}/config", b""),
    "config_of_version": ("GET", f"{MODEL}/versions/1/config", b""),
    "statistics": ("GET", f"{MODEL}/stats", b""),
    "statistics_of_version": ("GET", f"{MODEL}/versions/1/stats", b""),
    "index": ("POST", "/v2/repository/index", b""),
    "load": ("POST", "/v2/repository/models/identity/load", b""),
    "unload": ("POST", "/v2/repository/models/spin/unload", b"{}"),
    "device": ("GET", "/admin/device", b""),
    "partitions": ("GET", "/admin/partitions", b""),
    "probe": ("POST", "/admin/partitions/probe", b""),
    "memory": ("GET", "/admin/memory", b""),
    "strain": ("POST", "/admin/tenants/acme/strain", b'{"kind": "memory read", "seconds": 0.01}'),
    "repartition": ("PUT", "/admin/partitions", b'{"acme": 1}'),
    "transfer": ("PUT", "/admin/tenants/acme/device", b'{"device": "0"}'),  # Where it is already.
    "advice": ("GET", "/admin/advice?seconds=0.1", b""),
    "moves": ("GET", "/admin/moves", b""),
    "autopilot": ("GET", "/admin/autopilot", b""),
    "switch": ("PUT", "/admin/autopilot", b'{"mode": "off"}'),
    "tenants": ("GET", "/admin/tenants", b""),
    "load_for": ("POST", "/admin/tenants/acme/models/spin/load", b""),
    "unload_for": ("POST", "/admin/tenants/acme/models/spin/unload", b""),
    "status": ("GET", "/admin/status", b""),
    "reload": ("POST", "/admin/reload", b""),
    "drain": ("POST", "/admin/drain", b""),
    "metrics": ("GET", "/metrics", b""),
    "usage": ("GET", "/admin/usage", b""),
}
"""A request for every operation that answers as its description says first."""
ERRORS = [
    ("ready", "POST", "/v2/health/ready", {}, b"", 405),
    ("metadata", "GET", "/v2/models/nothing", {}, b"", 404),
    ("metadata", "GET", MODEL, {"X-Tenant": "nobody"}, b"", 401),
    ("infer", "POST", f"{MODEL}/infer", {}, b"", 400),
    ("infer", "POST", f"{MODEL}/infer", {"Content-Encoding": "br"}, b"{}", 415),
    ("generate", "POST", f"{MODEL}/generate", {}, b"{}", 400),
    ("generate_stream", "POST", f"{MODEL}/generate_stream", {}, b"{}", 400),
    ("index", "POST", "/v2/repository/index", {}, b'{"ready": 1}', 400),
    ("index", "POST", "/v2/repository/index", {}, b" " * ((1 << 20) + 1), 413),
    ("load", "POST", "/v2/repository/models/nothing/load", {}, b"", 400),
    ("load", "POST", "/v2/repository/models/identity/load", {"Via": "1.1 a"}, b"", 401),
    ("unload", "POST", "/v2/repository/models/nothing/unload", {"X-Tenant": "nobody"}, b"", 401),
    ("tenants", "GET", "/admin/tenants", {"Via": "1.1 a"}, b"", 401),
    ("partitions", "GET", "/admin/partitions?probe=banana", {}, b"", 400),
    ("repartition", "PUT", "/admin/partitions", {}, b'{"acme": 4096}', 409),
    ("advice", "GET", "/admin/advice?seconds=0", {}, b"", 400),
    ("switch", "PUT", "/admin/autopilot", {}, b'{"mode": "fast"}', 400),
    ("strain", "POST", "/admin/tenants/acme/strain", {}, b'{"kind": "L2", "seconds": 3}', 400),
    ("strain", "POST", "/admin/tenants/acme/strain", {}, b'{"kind": "PCIe in", "seconds": 1}', 409),
    ("strain", "POST", "/admin/tenants/nobody/strain", {}, b'{"kind": "L2", "seconds": 1}', 404),
    ("transfer", "PUT", "/admin/tenants/acme/device", {}, b'{"device": "7"}', 400),
    ("load_for", "POST", "/admin/tenants/acme/models/nothing/load", {}, b"", 400),
    ("unload_for", "POST", "/admin/tenants/nobody/models/identity/unload", {}, b"", 404),
    ("transfer", "PUT", "/admin/tenants/nobody/device", {}, b'{"device": "0"}', 404),
]
"""An operation, a request, and the status of its error."""


TEXTS = {
    "models": ("GET", "/v1/models", b""),
    "model": ("GET", "/v1/models/minilm", b""),
    "embeddings": ("POST", "/v1/embeddings", b'{"model": "minilm", "input": ["a cat", "a dog"]}'),
    "rerank": ("POST", "/v1/rerank", b'{"model": "minilm", "query": "a", "documents": ["b", "c"], "return_documents": true}'),
}
"""The same for models that take texts, of which `standard` has none."""
TEXT_ERRORS = [
    ("model", "GET", "/v1/models/nothing", {}, b"", 404),
    ("models", "GET", "/v1/models", {"X-Tenant": "nobody"}, b"", 401),
    ("embeddings", "POST", "/v1/embeddings", {}, b'{"model": "identity", "input": "a"}', 404),
    ("embeddings", "POST", "/v1/embeddings", {}, b'{"model": "minilm", "input": []}', 400),
    ("rerank", "POST", "/v1/rerank", {}, b"{}", 400),
    ("rerank", "POST", "/v1/rerank", {}, b" " * ((1 << 20) + 1), 413),
]


def routes(routers: tuple[APIRouter, ...]) -> Iterator[APIRoute]:
    for router in routers:
        yield from (route for route in router.routes if isinstance(route, APIRoute) and route.include_in_schema)


ROUTES = {operation_id(route): route for route in routes((*PUBLIC, *admin_docs.ROUTERS))}


def operations(document: Document) -> dict[str, dict[str, Any]]:
    """The operations of a document, by identifier."""
    paths = json.loads(document.json)["paths"]
    return {operation["operationId"]: operation for methods in paths.values() for operation in methods.values()}


OPERATIONS = operations(docs.document()) | operations(admin_docs.document())


@pytest.mark.parametrize("path", DOCUMENTS)
def test_every_way_to_serve_answers_the_same_document(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.content == DOCUMENTS[path].json


@pytest.mark.parametrize("path", PAGES)
def test_docs_are_a_page_that_loads_nothing(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.content) == (200, PAGES[path].page)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert not [word for word in ("<script", "src=", "@import", "url(", "<link") if word in answer.text]
    assert "//" not in answer.text.replace('<a href="https://', "")  # Only what a reader follows leads elsewhere.


def test_every_operation_is_requested_here() -> None:
    assert {*REQUESTS, *TEXTS} == set(ROUTES) == set(OPERATIONS)


@pytest.mark.parametrize("name", [name for name in REQUESTS if name not in ("drain", "unload")])
def test_answers_are_those_of_the_response_model(http: httpx.Client, name: str) -> None:
    method, path, body = REQUESTS[name]
    check(name, http.request(method, path, content=body))


def check(name: str, answer: httpx.Response) -> None:
    """This is the answer that the first response of this operation describes: its status, its type, and its fields in order."""
    assert f"{answer.status_code}" == next(iter(OPERATIONS[name]["responses"]))
    content = OPERATIONS[name]["responses"][f"{answer.status_code}"].get("content", {})
    assert answer.headers.get("content-type", "").partition(";")[0] in (content or [""])
    if (model := ROUTES[name].response_model) is None:
        assert bool(answer.content) == bool(content)
        return
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    found = adapter.validate_json(answer.content, strict=True)
    written = adapter.dump_json(found, exclude_unset=True)
    if model is schemas.ModelConfiguration:  # Fields that the schema does not list stand between those that it does.
        assert json.loads(written) == answer.json()
    else:
        assert written == answer.content


def test_unload_answers_as_described_and_so_does_the_index_then(http: httpx.Client) -> None:
    try:
        method, path, body = REQUESTS["unload"]
        check("unload", http.request(method, path, content=body))
        answer = http.post("/v2/repository/index")
        check("index", answer)
        assert {"UNAVAILABLE"} == {entry["state"] for entry in answer.json() if entry["name"] == "spin"}
    finally:
        assert http.post("/v2/repository/models/spin/load").status_code == 200


def test_drain_answers_as_described(standard: Path) -> None:
    with serving(configuration(standard)) as served:
        check("drain", httpx.post(f"{served.url}/admin/drain", timeout=30))


def test_texts_are_answered_as_described(standard: Path, tmp_path: Path) -> None:
    encoders.write(tmp_path, "minilm", encoders.encoder(1, 16), 4)
    with serving(configuration(tmp_path)) as served, client(served) as http:
        for name, (method, path, body) in TEXTS.items():
            check(name, http.request(method, path, content=body))


@pytest.mark.parametrize(("name", "method", "path", "headers", "body", "status"), [*ERRORS, *TEXT_ERRORS])
def test_errors_are_described(
    http: httpx.Client, name: str, method: str, path: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    answer = http.request(method, path, headers=headers, content=body)
    assert answer.status_code == status
    responses = OPERATIONS[name]["responses"]
    described = responses.get(f"{status}") or responses["default"]
    model = text_schemas.OpenAIError if name in TEXTS else schemas.Error
    assert described["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{model.__name__}"}
    adapter = TypeAdapter(model)
    assert adapter.dump_json(adapter.validate_json(answer.content)) == answer.content
    assert all(name in answer.headers for name in described.get("headers", ()))


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_are_complete(document: Document) -> None:
    content = json.loads(document.json)
    names = [f"#/components/schemas/{name}" for name in content["components"]["schemas"]]
    assert set(references(content)) == set(names)
    tags = {tag["name"] for tag in content["tags"]}
    for name, operation in operations(document).items():
        assert operation["summary"], name
        assert set(operation["tags"]) <= tags, name
        assert "422" not in operation["responses"], name
        assert operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"].endswith("Error")
        assert operation["summary"].split()[0] in document.page.decode()
    for path, methods in content["paths"].items():
        for operation in methods.values():
            parameters = {each["name"]: each for each in operation.get("parameters", ())}
            assert {name for name, each in parameters.items() if each["in"] == "path"} == set(re.findall(r"\{(\w+)\}", path))
            assert all(each["description"] for each in parameters.values()), path
    assert len(operations(document)) == sum(len(methods) for methods in content["paths"].values())


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from ([value["$ref"]] if "$ref" in value else [])
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_the_tenants_document_shows_no_administration() -> None:
    assert [path for path in json.loads(docs.document().json)["paths"] if not path.startswith(("/v1", "/v2"))] == []
    assert "adminKey" not in docs.document().json.decode()


@pytest.mark.parametrize("router", [*PUBLIC, *admin_docs.ROUTERS])
def test_security_follows_from_what_a_route_depends_on(router: APIRouter) -> None:
    kinds = {
        "/v1": "tenantKey",
        "/v2/models": "tenantKey",
        "/v2/repository": "tenantKey",
        "/admin": "adminKey",
        "/metrics": "adminKey",
    }
    for route in routes((router,)):
        wanted = next((kind for start, kind in kinds.items() if route.path.startswith(start)), None)
        schemes = [next(iter(each), None) for each in OPERATIONS[operation_id(route)].get("security", ())]
        assert schemes[:1] == ([wanted] if wanted else [])


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("index", schemas.IndexRequest),
        ("load", schemas.LoadRequest),
        ("unload", schemas.UnloadRequest),
        ("infer", schemas.InferRequest),
        ("embeddings", text_schemas.EmbeddingsRequest),
        ("rerank", text_schemas.RerankRequest),
    ],
)
def test_request_bodies_are_described(name: str, model: type[BaseModel]) -> None:
    content = OPERATIONS[name]["requestBody"]["content"]["application/json"]
    assert content["schema"] == {"$ref": f"#/components/schemas/{model.__name__}"}
    model.model_validate(content.get("example", SMALL))
