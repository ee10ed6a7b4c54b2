"""Identifies the tenant of a request by its bearer key, its X-Tenant header, or the default."""

import hashlib
from collections.abc import Iterable

from ..config.tenant import TenantConfig
from ..errors import Unauthorized


class Tenancy:
    """All tenants by name and by key. Immutable."""

    def __init__(self, tenants: Iterable[TenantConfig], default: str | None) -> None:
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self._default = default
        self._by_key = {key: tenant for tenant in self.tenants.values() for key in tenant.keys_sha256}

    def identify(self, authorization: str | None, name: str | None) -> TenantConfig:
        """The tenant of a request with these values of Authorization and X-Tenant.

        Raises Unauthorized for an unknown key, an unknown tenant, a tenant that needs its key, and a key of another tenant
        than the name. If no tenant has a key, Authorization is ignored: it is for a proxy in front of this server.
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
    return hashlib.sha256(key.strip(" \t").encode("latin-1", "replace")).hexdigest()


def _unknown(name: str | None) -> str:
    if name:
        return f"X-Tenant: there is no tenant {name!r}"
    return "no tenant: send Authorization: Bearer KEY or X-Tenant: NAME"
