"""Whose connection is this? From the first headers on it, without reading the body, to the process that is to have it."""

from ..errors import Ambiguous, Unauthorized
from ..http.head import has_bare_line_feed
from ..http.strict import headers
from ..tenants.auth import Tenancy

SHARED = "(shared)"
"""The process for what is nobody's in particular: administration, metrics, health. No tenant may have such a name."""
UNAUTHENTICATED = "(unauthenticated)"
"""The process for connections that show no valid tenant, so that their flood is nobody's but their own."""
MOST = 16 * 1024
"""Bytes of headers to look at."""

_ADMINISTRATION = (b"/admin", b"/metrics")
_NEUTRAL = (b"/v2", b"/v2/", b"/", b"/docs", b"/openapi.json")


def destination(data: bytes, tenancy: Tenancy) -> str | None:
    """The process that these first bytes of a connection are for; None if more have to come before that is known."""
    data = data[:MOST]
    whole, data = len(data) == MOST, data.lstrip(b"\r\n")
    if data and not data[:1].isalpha():
        return UNAUTHENTICATED  # Not HTTP, and may wait for an answer before it says more: TLS, for one.
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return UNAUTHENTICATED if whole or has_bare_line_feed(data) else None
    first, *lines = data[:end].split(b"\r\n")
    try:
        fields = headers(map(_field, lines))
    except Ambiguous:
        return UNAUTHENTICATED
    return belongs(_path(first), fields.get(b"authorization"), fields.get(b"x-tenant"), tenancy)


def belongs(path: bytes, authorization: bytes | None, name: bytes | None, tenancy: Tenancy) -> str:
    """The same for a request that was parsed."""
    if path.startswith(_ADMINISTRATION):
        return SHARED
    try:
        return tenancy.identify(_text(authorization), _text(name)).name
    except Unauthorized:
        neutral = path in _NEUTRAL or path.startswith(b"/v2/health/")
        return SHARED if neutral and not authorization else UNAUTHENTICATED


def _path(line: bytes) -> bytes:
    parts = line.split(b" ", 2)
    return parts[1].partition(b"?")[0] if len(parts) == 3 else b""


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.lower(), value.strip(b" \t")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
