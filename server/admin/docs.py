"""`/admin/openapi.json` and `/admin/docs`: the administrators' API, for administrators."""

from functools import cache

from ..api.dependencies import RequireAdmin
from ..api.openapi import Document, describe
from ..api.openapi import router as router_of
from . import autopilot, memory, metrics, models, partitions, schemas, settings, status, usage

JSON, PAGE = "/admin/openapi.json", "/admin/docs"

_DESCRIPTION = (
    "Administration and metrics, for those with the admin key, or, where none is configured, for programs on the server's own "
    "machine. docs/protocol.md says in detail who may administer.\n\nThe tenants' API is described in `/docs`."
)
_TAGS = [
    {"name": "Administration", "description": "The device, who holds which part of it, and the end of serving."},
    {"name": "Autopilot", "description": "What was moved between tenants and why, and what moves it."},
    {"name": "Metrics", "description": "For Prometheus."},
]


ROUTERS = (
    partitions.router,
    memory.router,
    autopilot.advice_router,
    autopilot.router,
    models.router,
    settings.router,
    status.router,
    usage.router,
    metrics.router,
)
"""What is described."""


@cache
def document() -> Document:
    """The administrators' document, computed at the first call."""
    bodies = (schemas.Counts, schemas.Transfer, schemas.Straining, schemas.AutopilotMode)
    return describe("Greenlane administration", _DESCRIPTION, ROUTERS, bodies, _TAGS, JSON)


router = router_of(document, JSON, PAGE, [RequireAdmin])
