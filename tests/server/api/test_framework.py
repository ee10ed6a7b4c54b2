"""What is true of every route and handler of an application."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from server.admin import models
from server.admin.lifecycle import ROUTERS as ADMIN_ROUTERS
from server.api import framework
from server.api.docs import ROUTERS
from server.processes.http_side import proxy


def calls(dependant: Dependant) -> Iterator[Any]:
    """What is called for a route: its function, and what that depends on."""
    yield dependant.call
    for each in dependant.dependencies:
        yield from calls(each)


ALL = [
    route
    for router in (*ROUTERS, *ADMIN_ROUTERS, models.forwarded, proxy.router)
    for route in router.routes
    if isinstance(route, APIRoute)
]


@pytest.mark.parametrize("route", ALL, ids=lambda route: f"{min(route.methods)} {route.path}")
def test_nothing_of_a_route_is_called_on_another_thread(route: APIRoute) -> None:
    """The framework does that with plain functions, which takes a tenth of a millisecond for each."""
    plain = [call for call in calls(route.dependant) if not _is_coroutine(call)]
    assert plain == []


def test_no_error_is_handled_on_another_thread() -> None:
    handlers = framework.build(ROUTERS).exception_handlers
    assert [handler for kind, handler in handlers.items() if kind in framework.ERRORS and not _is_coroutine(handler)] == []


def _is_coroutine(call: Any) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
