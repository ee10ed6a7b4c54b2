"""Decides which process a connection belongs to, from the headers of its first request; bodies are not looked at."""

from ...errors import Ambiguous, Unauthorized
from ...http.exchange import Headers
from ...http.head import has_bare_line_feed
from ...http.paths import is_shared, is_tenantless, of_request_line
from ...http.strict import credentials, headers
from ...link.occupancy import LEAD
from ...tenants.auth import Tenancy

SHARED = "(shared)"
"""The shared HTTP process: administration, metrics, the status page, health. Tenants' names have no parentheses."""
UNAUTHENTICATED = "(unauthenticated)"
"""The HTTP process for connections that show no valid tenant, so that a flood of them slows down no one else."""
DISPATCHER = "(dispatcher)"
"""The dispatcher, in logs and in the process table."""
MAX_HEAD = 16 * 1024
"""Bytes of headers to look at."""


def process_name(tenant: str, number: int) -> str:
    """The name of a tenant's HTTP process of this number: the tenant's, and for helpers, from 2 on, the number after it."""
    return tenant if number == LEAD else f"{tenant} ({number})"


def owner(process: str) -> str:
    """The tenant of the HTTP process of this name; the name itself for the shared and the unauthenticated one."""
    return process.partition(" (")[0]


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
    return process_for(of_request_line(first), fields, tenancy)


def process_for(path: bytes, fields: Headers, tenancy: Tenancy) -> str:
    """The process that a parsed request is for, by its path and the headers that name its tenant."""
    if is_shared(path):
        return SHARED
    try:
        return tenancy.identify(*credentials(fields)).name
    except Unauthorized:
        return SHARED if is_tenantless(path) and not fields.get(b"authorization") else UNAUTHENTICATED


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.lower(), value.strip(b" \t")
