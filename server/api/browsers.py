"""Does a web page or a proxy stand behind a request? Requests that change the server are refused if one does.

A web page can make the browser send anything that a program on the same machine could send. But the browser adds where the
page came from (Origin, Sec-Fetch-Site), or at least the name by which it reached this server (Host). After DNS rebinding that
name is the attacker's.

All functions take headers with lower-case names, and return what gave the request away, for the error text, or None.
"""

import socket
from collections.abc import Iterable, Mapping
from ipaddress import ip_address

_PROXY_HEADERS = ("via", "forwarded", "x-real-ip", "cf-connecting-ip", "true-client-ip")
_FORWARDED = "x-forwarded-"


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
