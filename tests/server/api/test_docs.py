"""What holds for every described route, and the page that shows them."""

import json
import re
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import APIRouter, Response
from fastapi.routing import APIRoute

from server.admin import docs as admin_docs
from server.admin import metrics, partitions
from server.admin.lifecycle import ROUTERS
from server.api import docs, metadata, model_control, status_page
from server.api.docs_page import render
from server.api.openapi import Document, errors

from .documents import WRITTEN, lines

SERVED = (metadata.router, model_control.router, docs.router, status_page.router, *ROUTERS)
DOCUMENTS = [docs.document(), admin_docs.document()]


def routes(*routers: APIRouter) -> list[APIRoute]:
    return [route for router in routers for route in router.routes if isinstance(route, APIRoute)]


@pytest.mark.parametrize("route", routes(*SERVED), ids=lambda route: f"{route.methods} {route.path}")
def test_routes_return_responses_so_that_models_cost_nothing(route: APIRoute) -> None:
    assert issubclass(typing.get_type_hints(route.endpoint)["return"], Response)


def test_only_these_routes_are_not_described() -> None:
    hidden = {(*(route.methods or ()), route.path) for route in routes(*SERVED) if not route.include_in_schema}
    heads = {("HEAD", path) for path in ("/", "/v2", "/v2/", "/v2/health/live", "/v2/health/ready")}
    heads |= {("HEAD", "/v2/models/{name}/ready"), ("HEAD", "/v2/models/{name}/versions/{version}/ready")}
    pages = {("GET", f"{start}{path}") for start in ("", "/admin") for path in ("/docs", "/openapi.json")}
    settings = {("GET", "/v2/logging"), ("POST", "/v2/logging")}  # Triton's; docs/protocol.md has them.
    assert hidden == heads | pages | settings | {("GET", "/"), ("GET", "/status/{name}"), ("GET", "/v2/")}


@pytest.mark.parametrize(("routers", "document"), [(docs.ROUTERS, docs.document), (ROUTERS, admin_docs.document)])
def test_every_other_route_is_described(routers: tuple[APIRouter, ...], document: Callable[[], Document]) -> None:
    served = {route.path for route in routes(*routers) if route.include_in_schema}
    assert served <= set(json.loads(document().json)["paths"])  # FastAPI does not serve inferences.


@pytest.mark.parametrize("router", [model_control.router, partitions.router, metrics.router])
def test_routes_of_a_router_share_its_tag(router: APIRouter) -> None:
    assert {tuple(route.tags) for route in routes(router)} == {tuple(router.tags)}


@pytest.mark.parametrize(("path", "document"), WRITTEN.items(), ids=lambda each: getattr(each, "name", ""))
def test_a_document_is_as_it_was(path: Path, document: Callable[[], Document]) -> None:
    assert list(lines(document())) == path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_on_the_page_lead_somewhere(document: Document) -> None:
    page = document.page.decode()
    targets = set(re.findall(r'id="([^"]+)"', page))
    links = re.findall(r'href="#([^"]+)"', page)
    assert links
    assert set(links) <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_page_begins_with_links_to_every_operation(document: Document) -> None:
    contents = document.page.decode().partition("<nav")[2].partition("</nav>")[0]
    operations = re.findall(r'<h3 id="([^"]+)"><code>[A-Z]+ /', document.page.decode())
    assert operations
    assert {*operations, "authorization", "schemas"} <= set(re.findall(r'href="#([^"]+)"', contents))


def test_names_of_pages_are_links() -> None:
    page = docs.document().page.decode()
    assert re.search(r'<a href="https://github\.com/[^"]+/docs/protocol\.md">docs/protocol\.md</a>', page)
    assert '<code><a href="/admin/docs">/admin/docs</a></code>' in page


def test_texts_on_the_page_are_escaped() -> None:
    evil = "<script>alert('x')</script> & `<b>`"
    operation = {"tags": ["T"], "operationId": "o", "summary": evil, "responses": {"200": {"description": evil}}}
    document = {
        "openapi": "3.1.0",
        "info": {"title": evil, "version": evil, "description": evil},
        "tags": [{"name": "T", "description": evil}],
        "paths": {"/<p>": {"get": {**operation, "parameters": [{"name": "<n>", "in": "query", "description": evil}]}}},
        "components": {"securitySchemes": {"s": {"description": evil}}, "schemas": {"S": {"description": evil}}},
    }
    page = render(document, "/openapi.json")
    assert not [tag for tag in ("<script", "<p></code>", "<n>") if tag in page]
    assert page.count("&lt;script&gt;") == 11
    assert "<code>&lt;b&gt;</code>" in page


def test_errors_that_are_retried_are_described_with_their_header() -> None:
    described = errors(429, 504)
    assert list(described) == [429, 504, "default"]
    assert list(described[429]["headers"]) == ["Retry-After"]
    assert "headers" not in described[504]
