"""Which requests a web page or a proxy sent, as far as their headers tell: what may change the server is not for those.

A page may have the browser send what any program on the same machine may. But a browser says with it where the page is from
(Origin, Sec-Fetch-Site), or at least under which name it knows this server (Host), which after DNS rebinding is the page's.
"""

import socket
from collections.abc import Iterable, Mapping
from ipaddress import ip_address

_BY_PROXIES = ("via", "forwarded", "x-real-ip", "cf-connecting-ip", "true-client-ip")
_FORWARDED = "x-forwarded-"


def proxied(headers: Mapping[str, str]) -> str | None:
    """The header that shows that a proxy passed this request on, or None. Names are lower-case."""
    return next((name for name in headers if name in _BY_PROXIES or name.startswith(_FORWARDED)), None)


def from_elsewhere(headers: Mapping[str, str]) -> str | None:
    """What shows that a page sent this that did not come from where the request went, or None."""
    site, origin, host = headers.get("sec-fetch-site"), headers.get("origin"), headers.get("host", "")
    if site not in (None, "none", "same-origin"):
        return f"Sec-Fetch-Site: {site[:40]}"
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        return f"Origin: {origin[:80]}"
    return None


def is_page(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that a page sent this."""
    return "origin" in headers or headers.get("sec-fetch-site", "none") != "none"


def foreign_host(headers: Mapping[str, str], names: Iterable[str]) -> str | None:
    """The Host that this request names, if it is none of these names, this machine's or an address; else None.

    No page can be rebound to an address: it would have to come from there. Without Host no browser sent this.
    """
    host = headers.get("host")
    if host is None:
        return None
    name = _name(host)
    own = {"localhost", socket.gethostname().lower(), *(each.lower() for each in names)}
    known = name in own or name.endswith(".localhost") or _is_address(name)
    return None if known else f"Host: {host[:80]}"


def _name(host: str) -> str:
    """Without the port and the brackets of an IPv6 address, and the dot that may end a name."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
