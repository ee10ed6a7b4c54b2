"""The locks of tenants' models and partitions, and the order in which they are taken."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager


class TenantLocks:
    """Two locks for each tenant, of one event loop. Take `changing` before `paging`; the one of `WorkerControl` comes last."""

    def __init__(self, tenants: Iterable[str]) -> None:
        self.changing: dict[str, asyncio.Lock] = {}
        """Held while a tenant's models or partition change, including the preparation."""
        self.paging: dict[str, asyncio.Lock] = {}
        """Held while a model of a tenant is paged in or out, and while its partition changes."""
        for tenant in tenants:
            self.add(tenant)

    def add(self, tenant: str) -> None:
        """A tenant has come."""
        self.changing[tenant], self.paging[tenant] = asyncio.Lock(), asyncio.Lock()

    def remove(self, tenant: str) -> None:
        """A tenant has gone."""
        self.changing.pop(tenant, None)
        self.paging.pop(tenant, None)

    def held(self, tenant: str) -> bool:
        """Whether one of a tenant's is held."""
        return any(tenant in locks and locks[tenant].locked() for locks in (self.changing, self.paging))

    @asynccontextmanager
    async def both(self, tenant: str) -> AsyncIterator[None]:
        """Hold both of a tenant in this block; of one that has gone nothing."""
        async with self.changing.get(tenant) or asyncio.Lock(), self.paging.get(tenant) or asyncio.Lock():
            yield
