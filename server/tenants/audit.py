"""Audit lines: who called what of the administration, who was refused for lack of a key, and what a reload has changed.

They go to the logger `greenlane.audit`, each with its fields beside the text; `server.audit` says where that writes.

Lines are limited by who causes them: an administrator's are never left out, a tenant's calls leave out its own lines only, and
requests without a valid key those of requests whose addresses are in the same group.
"""

import logging
from ipaddress import IPv4Address, ip_address
from typing import Any

from ..errors import Unauthorized
from ..host.log_writer import ALWAYS
from .auth import digest

log = logging.getLogger("greenlane.audit")

_REFUSED = 400
"""Statuses from here on say that nothing was changed."""
_DIGITS = 8
"""Digits of a key's digest that name it, as in the answer of a reload."""
_MOST = 200
"""Characters of a path: clients choose those."""
_GROUPS = 32
"""Groups of the addresses of clients without a valid key, each with an allowance of its own: one address leaves out few others'
lines, and however many addresses there are, the lines stay few.
"""
_CALLER, _TENANT = "caller", "tenant "


def is_administrators(scope: Any) -> None:
    """Note in this ASGI scope that its request passed the admin rule."""
    scope[_CALLER] = ALWAYS


def is_tenants(scope: Any, tenant: str) -> None:
    """Note in this ASGI scope whose request it is."""
    scope[_CALLER] = f"{_TENANT}{tenant}"


def record(event: str, caller: str = ALWAYS, **fields: object) -> None:
    """Write a line with these fields, without those that are None. Does nothing where there is no audit.

    Too many of one `caller` are left out, unless that is `ALWAYS`.
    """
    if log.isEnabledFor(logging.INFO):
        found = {name: value for name, value in fields.items() if value is not None}
        log.info(event, extra={"audit": found, "caller": caller})


def call(scope: Any, authorization: str | None, status: int) -> None:
    """A call over HTTP that changes something, and how it was answered: `scope` is ASGI's of its request."""
    client = scope.get("client")
    who: str = scope.get(_CALLER) or _group(client)
    caller = who if who == ALWAYS else f"{who}, {'done' if status < _REFUSED else 'refused'}"
    tenant = who.removeprefix(_TENANT) if who.startswith(_TENANT) else None
    path, key = scope["path"][:_MOST], key_of(authorization)
    record("call", caller, method=scope["method"], path=path, client=_address(client), tenant=tenant, key=key, status=status)


def refused(error: BaseException, method: str, path: str, client: Any, authorization: str | bytes | None) -> None:
    """A request that is answered with this error, if that is for lack of a key or a tenant."""
    if isinstance(error, Unauthorized) and log.isEnabledFor(logging.INFO):
        given = authorization.decode("latin-1") if isinstance(authorization, bytes) else authorization
        where, key = _address(client), key_of(given)
        reason = str(error)[:_MOST]
        record("unauthorized", _group(client), method=method, path=path[:_MOST], client=where, key=key, reason=reason)


def key_of(authorization: str | None) -> str | None:
    """The first digits of the digest of the key in this header, which name it as `keys_sha256` does; None without a key."""
    scheme, _, key = (authorization or "").partition(" ")
    return f"{digest(key)[:_DIGITS]}..." if key and scheme.lower() == "bearer" else None


def _address(client: Any) -> str | None:
    return str(client[0]) if isinstance(client, tuple | list) and client else client


def _group(client: Any) -> str:
    """Whose lines are limited together: those of one address, or of one network of IPv6, and of some others."""
    address = str(_address(client))
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        network: object = address
    else:
        found = getattr(found, "ipv4_mapped", None) or found
        network = found if isinstance(found, IPv4Address) else int(found) >> 64
    return f"unauthenticated, group {hash(str(network)) % _GROUPS + 1} of {_GROUPS}"
