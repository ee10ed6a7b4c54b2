"""Whose request is this? From a bearer key, a tenant's name or the default, to one tenant."""

import hashlib
from collections.abc import Iterable

from ..config.schema import TenantConfig
from ..errors import Unauthorized


class Tenancy:
    """Every tenant, by name and by key. Changes nothing once made."""

    def __init__(self, tenants: Iterable[TenantConfig], default: str | None) -> None:
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self._default = default
        self._by_key = {key: tenant for tenant in self.tenants.values() for key in tenant.keys_sha256}

    def __repr__(self) -> str:
        return f"<Tenancy of {', '.join(self.tenants)}, default {self._default}>"

    def identify(self, authorization: str | None, name: str | None) -> TenantConfig:
        """The tenant of a request with these values of Authorization and X-Tenant.

        Raises Unauthorized for a key that nobody has, a tenant that does not exist, one that wants its key, and a key and
        a name that disagree. Where no tenant has a key, Authorization is not for this server, but for a proxy in front of it.
        """
        if authorization and self._by_key:
            return self._by_bearer(authorization, name)
        tenant = self.tenants.get(name or self._default or "")
        if tenant is None:
            raise Unauthorized(_unknown(name))
        if tenant.keys_sha256:
            raise Unauthorized(f"tenant {tenant.name!r} needs its key: send Authorization: Bearer KEY")
        return tenant

    def _by_bearer(self, authorization: str, name: str | None) -> TenantConfig:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("Authorization: expected 'Bearer KEY'")
        tenant = self._by_key.get(digest(key))
        if tenant is None:
            raise Unauthorized("Authorization: no tenant has this key")
        if name and name != tenant.name:
            raise Unauthorized(f"X-Tenant: {name!r}, but the key is another tenant's")
        return tenant


def digest(key: str) -> str:
    """The hexadecimal SHA-256 of a key, as the configuration holds it."""
    return hashlib.sha256(key.strip().encode("latin-1", "replace")).hexdigest()


def _unknown(name: str | None) -> str:
    if name:
        return f"X-Tenant: there is no tenant {name!r}"
    return "no tenant: send Authorization: Bearer KEY or X-Tenant: NAME"
