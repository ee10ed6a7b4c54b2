"""Requests that httptools accepts but this server refuses: those that two HTTP readers could take for different requests."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import Ambiguous
from .exchange import Headers

SINGLE_HEADERS = (b"authorization", b"x-tenant", b"inference-header-content-length", b"content-encoding")
"""Headers that identify the tenant or frame the body. None of them is a list, so each may appear only once."""

HEADER_TIMEOUT = 30.0
"""Seconds from the first byte of a request until its headers must be complete."""
HEADER_TIMEOUT_TEXT = f"the headers did not come within {HEADER_TIMEOUT:g} s"


class Violation(NamedTuple):
    """Why a request ends its connection: the status line's code and phrase, and the error text."""

    status: bytes
    text: str


NOT_HTTP = Violation(b"400 Bad Request", "the request is not HTTP: Invalid HTTP request received.")
MAX_HEADER_BYTES = 64 * 1024
"""Limit on the bytes of a request line with headers, of trailers, or between two chunks; beyond it a request is refused."""
LONG_HEADERS = Violation(
    b"431 Request Header Fields Too Large", f"more than {MAX_HEADER_BYTES} bytes of headers, which is the limit"
)

_HOST = re.compile(
    rb"(?:\[[0-9A-Za-z:._~%-]+\]|(?:[0-9A-Za-z._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?"
)  # RFC 9110, 7.2. It may be empty; what is in brackets may have a zone, which some clients send.
_A_HOST = "expected a name or an address, [in brackets] if it has colons, and then perhaps ':' and a port"


def find_violation(version: str, target: bytes, fields: Iterable[tuple[bytes, bytes]]) -> Violation | None:
    """The first violation in a request line and headers (names in lower case), or None."""
    if version not in ("1.1", "1.0"):
        return Violation(b"505 HTTP Version Not Supported", f"HTTP/{version}: expected HTTP/1.1 or HTTP/1.0")
    hosts = [value for name, value in fields if name == b"host"]
    if len(hosts) != 1 and (hosts or version == "1.1"):
        came = f"given {len(hosts)} times" if hosts else "missing"
        return Violation(b"400 Bad Request", f"Host: {came}; expected once, as HTTP/{version} requires")
    if hosts and not _HOST.fullmatch(hosts[0]):
        came = hosts[0].decode("latin-1")
        came = repr(came) if len(came) <= 40 else f"{came[:40]!r}..."
        return Violation(b"400 Bad Request", f"Host: {came}; {_A_HOST}")
    if b"#" in target:
        fragment = target[target.index(b"#") :].decode("latin-1")[:40]
        return Violation(b"400 Bad Request", f"the path has a fragment, {fragment!r}; a '#' in a name is written %23")
    codings = b", ".join(value for name, value in fields if name == b"transfer-encoding")
    if codings and version == "1.0":
        text = "Transfer-Encoding: given with HTTP/1.0, which has none; expected Content-Length"
        return Violation(b"400 Bad Request", text)
    if codings and codings.lower() != b"chunked":
        text = f"Transfer-Encoding: {codings.decode('latin-1')[:40]!r}; expected 'chunked' alone"
        return Violation(b"501 Not Implemented", text)
    return None


def credentials(headers: Headers) -> tuple[str | None, str | None]:
    """The values of Authorization and X-Tenant, by which `Tenancy.identify` finds the tenant."""
    authorization, tenant = headers.get(b"authorization"), headers.get(b"x-tenant")
    return (
        None if authorization is None else authorization.decode("latin-1"),
        None if tenant is None else tenant.decode("latin-1"),
    )


def headers(fields: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers by lower-case name; of a repeated header the last value.

    Raises Ambiguous if one of `SINGLE_HEADERS` is repeated.
    """
    fields = list(fields)
    found = dict(fields)
    if len(found) < len(fields):
        names = [name for name, _ in fields]
        if repeated := next((name for name in SINGLE_HEADERS if names.count(name) > 1), None):
            raise Ambiguous(f"{repeated.decode().title()}: given {names.count(repeated)} times; expected once")
    return found
