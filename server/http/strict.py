"""What of HTTP is refused though httptools reads it: what two readers could take for two different requests."""

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import Ambiguous
from .exchange import Headers

ONCE = (b"authorization", b"x-tenant", b"inference-header-content-length", b"content-encoding")
"""Fields that say whose a request is and what its body is; no list of values is meant by any of them."""

HEADERS_WITHIN = 30.0
"""Seconds from the first byte of a request until its headers have to be whole."""
TOO_SLOW = f"the headers did not come within {HEADERS_WITHIN:g} s"


class Fault(NamedTuple):
    """Why a connection is ended: the status line's status and the error's text."""

    status: bytes
    text: str


def fault(version: str, target: bytes, fields: Iterable[tuple[bytes, bytes]]) -> Fault | None:
    """What is wrong with a request line and headers, whose names are lower-case; None if nothing is."""
    if version not in ("1.1", "1.0"):
        return Fault(b"505 HTTP Version Not Supported", f"HTTP/{version}: expected HTTP/1.1 or HTTP/1.0")
    hosts = [value for name, value in fields if name == b"host"]
    if len(hosts) != 1 and (hosts or version == "1.1"):
        came = f"stands {len(hosts)} times" if hosts else "missing"
        return Fault(b"400 Bad Request", f"Host: {came}; expected it once, as HTTP/{version} has it")
    if b"#" in target:
        fragment = target[target.index(b"#") :].decode("latin-1")[:40]
        return Fault(b"400 Bad Request", f"the path has a fragment, {fragment!r}; a '#' in a name is written %23")
    codings = b", ".join(value for name, value in fields if name == b"transfer-encoding")
    if codings and version == "1.0":
        return Fault(b"400 Bad Request", "Transfer-Encoding: given with HTTP/1.0, which has none; expected Content-Length")
    if codings and codings.lower() != b"chunked":
        return Fault(b"501 Not Implemented", f"Transfer-Encoding: {codings.decode('latin-1')[:40]!r}; expected 'chunked' alone")
    return None


def headers(fields: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Fields by their lower-case names; of those that stand twice the last.

    Raises Ambiguous if one of `ONCE` stands twice: which of them was meant is not known.
    """
    fields = list(fields)
    found = dict(fields)
    if len(found) < len(fields):
        names = [name for name, _ in fields]
        if twice := next((name for name in ONCE if names.count(name) > 1), None):
            raise Ambiguous(f"{twice.decode().title()}: stands {names.count(twice)} times; expected once")
    return found
