"""Decides which process a connection belongs to, from the headers of its first request; bodies are not looked at."""

from ..errors import Ambiguous, Unauthorized
from ..http.head import has_bare_line_feed
from ..http.strict import headers
from ..tenants.auth import Tenancy

SHARED = "(shared)"
"""The shared HTTP process: administration, metrics, health. Tenants' names have no parentheses."""
UNAUTHENTICATED = "(unauthenticated)"
"""The HTTP process for connections that show no valid tenant, so that a flood of them slows down no one else."""
DISPATCHER = "(dispatcher)"
"""The dispatcher, in logs and in the process table."""
MAX_HEAD = 16 * 1024
"""Bytes of headers to look at."""

_ADMINISTRATION = (b"/admin", b"/metrics")
_TENANTLESS = (b"/v2", b"/v2/", b"/", b"/docs", b"/openapi.json")


def destination(data: bytes, tenancy: Tenancy) -> str | None:
    """The process that a connection with these first bytes is for; None if more bytes are needed to decide."""
    data = data[:MAX_HEAD]
    full, data = len(data) == MAX_HEAD, data.lstrip(b"\r\n")
    if data and not data[:1].isalpha():
        return UNAUTHENTICATED  # Not HTTP. The client may wait for an answer before it sends more, as with TLS.
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return UNAUTHENTICATED if full or has_bare_line_feed(data) else None
    first, *lines = data[:end].split(b"\r\n")
    try:
        fields = headers(map(_field, lines))
    except Ambiguous:
        return UNAUTHENTICATED
    return process_for(_path(first), fields.get(b"authorization"), fields.get(b"x-tenant"), tenancy)


def process_for(path: bytes, authorization: bytes | None, tenant: bytes | None, tenancy: Tenancy) -> str:
    """The process that a parsed request is for, by its path and the values of two of its headers."""
    if path.startswith(_ADMINISTRATION):
        return SHARED
    try:
        return tenancy.identify(_text(authorization), _text(tenant)).name
    except Unauthorized:
        needs_no_tenant = path in _TENANTLESS or path.startswith(b"/v2/health/")
        return SHARED if needs_no_tenant and not authorization else UNAUTHENTICATED


def _path(line: bytes) -> bytes:
    parts = line.split(b" ", 2)
    return parts[1].partition(b"?")[0] if len(parts) == 3 else b""


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.lower(), value.strip(b" \t")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
