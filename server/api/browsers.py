"""What web pages may ask: which may call the inference API (CORS), and which requests are refused because one sent them.

A web page can make the browser send anything that a program on the same machine could send. But the browser adds where the
page came from (Origin, Sec-Fetch-Site), or at least the name by which it reached this server (Host). After DNS rebinding that
name is the attacker's. So requests that change the server are refused if a page or a proxy stands behind them: functions that
take headers, with lower-case names, return what gave the request away, for the error text, or None.
"""

import socket
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from starlette.middleware.cors import CORSMiddleware

from ..http.asgi import Application
from ..http.exchange import Message, Receive, Send
from ..http.paths import is_text

_PROXY_HEADERS = ("via", "forwarded", "x-real-ip", "cf-connecting-ip", "true-client-ip")
_FORWARDED = "x-forwarded-"
_EXPOSED_HEADERS = ["inference-header-content-length", "retry-after", "server-timing", "x-request-id"]
"""What pages may read of an answer, beyond what browsers always let them."""
_MAX_AGE = 600
"""Seconds for which a browser may remember the answer to a preflight request."""


def proxy_header(headers: Mapping[str, str]) -> str | None:
    """The name of a header that only proxies add."""
    return next((name for name in headers if name in _PROXY_HEADERS or name.startswith(_FORWARDED)), None)


def cross_origin(headers: Mapping[str, str]) -> str | None:
    """The header that shows that a page of another origin than this server's sent the request."""
    site, origin, host = headers.get("sec-fetch-site"), headers.get("origin"), headers.get("host", "")
    if site not in (None, "none", "same-origin"):
        return f"Sec-Fetch-Site: {site[:40]}"
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        return f"Origin: {origin[:80]}"
    return None


def is_from_page(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that a page, of whatever origin, sent the request."""
    return "origin" in headers or headers.get("sec-fetch-site", "none") != "none"


def unknown_host(headers: Mapping[str, str], allowed: Iterable[str]) -> str | None:
    """The Host header, if it is neither in `allowed`, nor a name of this machine, nor an IP address.

    DNS rebinding needs a name, so addresses are safe. A request without Host was not sent by a browser.
    """
    host = headers.get("host")
    if host is None:
        return None
    name = _hostname(host)
    known = {"localhost", socket.gethostname().lower(), *(each.lower() for each in allowed)}
    return None if name in known or name.endswith(".localhost") or _is_address(name) else f"Host: {host[:80]}"


def _hostname(host: str) -> str:
    """The name in a Host header, without the port, the brackets of an IPv6 address and a trailing dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class Shared:
    """An application whose inference API, with metadata and health, has CORS for the origins that `set` was called with last.

    Never have administration, metrics, the status page, and loading and unloading of models.
    """

    def __init__(self, application: Application, origins: Sequence[str] = ()) -> None:
        self._application = application
        self.set(origins)

    def set(self, origins: Sequence[str]) -> None:
        """Allow these origins from now on."""
        cors = CORSMiddleware(self._application, origins, "*", "*", expose_headers=_EXPOSED_HEADERS, max_age=_MAX_AGE)
        self._cors = cors if origins else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        answer: Application = self._application
        if cors := self._cors:
            origin = next((value for name, value in scope.get("headers", ()) if name == b"origin"), None)
            if origin is not None and _is_shared(scope["path"]) and cors.is_allowed_origin(origin.decode("latin-1")):
                answer = cors
        await answer(scope, receive, send)


def _is_shared(path: str) -> bool:
    return (path.startswith(("/v1/", "/v2")) and not path.startswith("/v2/repository/models/")) or is_text(path)
