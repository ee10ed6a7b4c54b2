"""A tenant served in the process that has its device side."""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence

from ..config.tenant import TenantConfig
from ..errors import Conflict
from ..link import ring as links
from ..link.messages import ModelKey
from ..link.ring import Descriptors, Link
from .catalog import IndexEntry, ModelVersion
from .frontend import DeviceSide, HttpSide, Report, not_ended
from .publishing import agree, publish, withdraw
from .service import Tenant, last_uses, open_tenant, page_out, report, slots

log = logging.getLogger("greenlane")


class LocalTenant:
    """What a frontend does with a tenant of this process, by itself. Belongs to the event loop. Set `tenant` first."""

    tenant: Tenant

    def announce(self, name: str) -> None:
        self.tenant.catalog.announce(name)

    def listed(self) -> None:
        self.tenant.catalog.expected = None

    def withdraw(self, name: str) -> None:
        withdraw(self.tenant, name)

    async def last_uses(self) -> Mapping[ModelKey, int]:
        return last_uses(self.tenant)

    async def page_out(self, model: ModelKey) -> bool:
        return page_out(self.tenant, model)

    def page_in(self, model: ModelKey) -> None:
        self.tenant.catalog.paged.discard(model)

    def refuse(self, reason: str) -> None:
        self.tenant.refuse(reason)

    async def report(self) -> Report:
        return report(self.tenant)

    async def drained(self) -> None:
        await self.tenant.lane.drained()


class LocalFrontend(LocalTenant, HttpSide):
    """See `frontend.Frontend`. `only`: it is the only tenant of this process."""

    def __init__(self, config: TenantConfig, descriptors: Descriptors, link: Link, only: bool = False) -> None:
        self.link = link
        self.tenant = open_tenant(config, link, self)
        self.descriptors = descriptors
        """Of its link, which `relink` replaces."""
        self._only = only
        self._cores_before: set[int] | None = None
        self._device: DeviceSide | None = None

    @property
    def http_side(self) -> HttpSide:
        return self

    def open(self, device: DeviceSide) -> None:
        self._device = device
        self.tenant.lane.open(asyncio.get_running_loop())

    async def agree(self, name: str, served: Sequence[ModelVersion]) -> str:
        return await agree(self.tenant, name, served)

    async def publish(self, name: str, served: list[ModelVersion], problems: list[IndexEntry]) -> bool:
        await publish(self.tenant, name, served, problems)
        return True

    def set_cores(self, cores: frozenset[int] | None) -> None:
        """If this is the only tenant, move the event loop to its cores: two threads that alternate on one interpreter wake each
        other fastest on one core. With several tenants, requests of the others would run on this one's cores.
        """
        if self._only and cores:
            self._cores_before = self._cores_before or os.sched_getaffinity(0)
            try:
                os.sched_setaffinity(0, cores)
            except OSError as error:
                log.warning("the event loop cannot run on cores %s: %s", sorted(cores), error.strerror)

    def suspend(self, reason: str) -> None:
        self.tenant.suspend(reason)

    def fail_in_flight(self, reason: str, queued: bool = True) -> None:
        self.tenant.fail_in_flight(reason, queued)

    async def relink(self, limit: float = math.inf) -> Callable[[], None]:
        return await asyncio.shield(self._relink(limit))

    async def _relink(self, limit: float) -> Callable[[], None]:
        unused = links.renew(self.descriptors)
        try:
            link = links.join(unused, self.link.shares_interpreter, self.link.arena.memory)
            if not await self.tenant.lane.relink(link, limit):
                raise Conflict(not_ended(self.tenant.name, limit))
            self.link = link
            unused, self.descriptors = self.descriptors, unused
            return unused.close
        except BaseException:
            unused.close()
            raise

    def close(self) -> None:
        self.tenant.lane.close(asyncio.get_running_loop())
        if self._cores_before:
            os.sched_setaffinity(0, self._cores_before)
        self.descriptors.close()

    def cancel(self, slot: int, serial: int) -> None:
        if self._device:
            self._device.cancel(self.tenant.name, slot, serial)


def open_local(config: TenantConfig, only: bool = False) -> LocalFrontend:
    """A frontend in this process; `only`: its tenant is the only one. `close` it in the end."""
    descriptors = links.create(slots(config), config.memory)
    return LocalFrontend(config, descriptors, links.join(descriptors, shares_interpreter=only), only)
