"""Audit lines: who called what of the administration, who was refused for lack of a key, and what a reload has changed.

They go to the logger `greenlane.audit`, each with its fields beside the text; `server.audit` says where that writes.
"""

import logging
from typing import Any

from ..errors import Unauthorized
from .auth import digest

log = logging.getLogger("greenlane.audit")

_DIGITS = 8
"""Digits of a key's digest that name it, as in the answer of a reload."""
_MOST = 200
"""Characters of a path: clients choose those."""


def record(event: str, **fields: object) -> None:
    """Write a line with these fields, without those that are None. Does nothing where there is no audit."""
    if log.isEnabledFor(logging.INFO):
        log.info(event, extra={"audit": {name: value for name, value in fields.items() if value is not None}})


def call(method: str, path: str, client: Any, authorization: str | None, status: int) -> None:
    """A call that changes something, and how it was answered. `client` is an address and a port, or None."""
    record("call", method=method, path=path[:_MOST], client=_address(client), key=key_of(authorization), status=status)


def refused(error: BaseException, method: str, path: str, client: Any, authorization: str | bytes | None) -> None:
    """A request that is answered with this error, if that is for lack of a key or a tenant."""
    if isinstance(error, Unauthorized) and log.isEnabledFor(logging.INFO):
        given = authorization.decode("latin-1") if isinstance(authorization, bytes) else authorization
        where, key = _address(client), key_of(given)
        record("unauthorized", method=method, path=path[:_MOST], client=where, key=key, reason=str(error)[:_MOST])


def key_of(authorization: str | None) -> str | None:
    """The first digits of the digest of the key in this header, which name it as `keys_sha256` does; None without a key."""
    scheme, _, key = (authorization or "").partition(" ")
    return f"{digest(key)[:_DIGITS]}..." if key and scheme.lower() == "bearer" else None


def _address(client: Any) -> str | None:
    return str(client[0]) if isinstance(client, tuple | list) and client else client
