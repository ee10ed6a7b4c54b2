"""Where the models of this process's tenants are ready beside their home partitions.

A tenant's wide placement has granules of other tenants too, its narrow one a part of its own. The others are ready for a move,
which then only has to switch.
All are made in one way: a partition, and on it an alternate of each executor at home, within the tenant's budget.
"""

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from engines.thread_priority import lower_priority
from partitions import Device
from partitions.plan import Granules

from ..control.descriptions import Beside, ReadyShare
from ..control.fence import Fence
from ..control.stretch import Wide
from ..errors import Conflict
from ..workers.pace import Pace
from ..workers.worker import Worker
from .side import Means
from .tenant_locks import TenantLocks
from .tenant_placements import TenantPlacements

LOOK = 5.0
"""Seconds between two looks at which models take too long to go wide."""


class Placements:
    """See `server.control.device_runtime.Placements`. Belongs to the event loop.

    What is ready for a move is made on one thread: on a GPU at low priority, on CPU cores at normal priority, which the threads
    of a session would keep. `workers`, `pages` and `numbers` are as in `Means`; `pages` is changed here.
    """

    def __init__(
        self,
        device: Device,
        workers: Mapping[str, Worker],
        locks: TenantLocks,
        pages: dict[str, int],
        numbers: Mapping[str, int],
        max_pause: float,
    ) -> None:
        threads = ThreadPoolExecutor(1, "placements", lower_priority if device.kind == "cuda" else None)
        self.means = Means(device, workers, locks, pages, numbers, max_pause, threads)
        self._tenants: dict[str, TenantPlacements] = {}
        self._looking: asyncio.TimerHandle | None = None

    def of(self, tenant: str) -> TenantPlacements:
        """A tenant's, which begin with none."""
        if (found := self._tenants.get(tenant)) is None:
            found = self._tenants[tenant] = TenantPlacements(tenant, self.means)
        return found

    def pace(self, tenant: str) -> Pace | None:
        """What each worker of a tenant keeps to over PCIe."""
        return found.fence.pace if (found := self._tenants.get(tenant)) else None

    async def narrow(self, tenants: Collection[str]) -> None:
        waiting = {name: asyncio.ensure_future(self.of(name).stretch.pause()) for name in tenants}
        if waiting:
            await asyncio.wait(waiting.values(), timeout=self.means.max_pause)
        if late := [name for name, at_home in waiting.items() if not (at_home.done() and at_home.result())]:
            for name in late:
                waiting[name].cancel()
            raise Conflict(f"tenant {late[0]}: {self.of(late[0]).stretch.too_late}; nothing was changed")

    async def plan(self, wide: Mapping[str, Wide], fences: Mapping[str, Fence]) -> None:
        for name in dict.fromkeys((*self._tenants, *wide, *fences)):
            self.of(name).plan(wide.get(name), fences.get(name))
        if wide and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK, self.look)

    def set_page(self, tenant: str, page: int | None) -> None:
        """A tenant, here or elsewhere, has this activity page from now on, which belongs to this; None if it has gone."""
        pages = self.means.pages
        if (before := pages.pop(tenant, None)) is not None:
            os.close(before)
        if page is not None:
            pages[tenant] = page
        for each in self._tenants.values():
            if each.fence.reopen_page(tenant):
                each.follow()

    async def hold(self, ready: Mapping[str, Sequence[Granules]]) -> dict[str, list[ReadyShare]]:
        for name in dict.fromkeys((*self._tenants, *ready)):
            self.of(name).hold(ready.get(name, ()))
        await self.settled()
        return {name: state.ready for name, state in (await self.states()).items() if state.ready}

    async def moved(self, figures: Mapping[str, Mapping[str, int]]) -> None:
        for name, theirs in figures.items():
            if name in self.means.workers:
                self.of(name).fence.moved(theirs)

    async def settled(self) -> None:
        """Wait until all is made, or cannot be."""
        for each in list(self._tenants.values()):
            await each.settled()

    async def states(self) -> dict[str, Beside]:
        return {name: each.state() for name, each in self._tenants.items()}

    def look(self) -> None:
        """Find the models that take too long to go wide, for `states`."""
        for each in self._tenants.values():
            each.stretch.look()
        self._looking = asyncio.get_running_loop().call_later(LOOK, self.look)

    async def remove(self, tenant: str) -> None:
        """This tenant goes. With its locks held."""
        if found := self._tenants.pop(tenant, None):
            await found.close()

    async def close(self) -> None:
        """Close what is ready, and the pages; all tenants' locks are held, and nothing is in flight."""
        if self._looking:
            self._looking.cancel()
        for each in list(self._tenants.values()):
            await each.close()
        for page in self.means.pages.values():
            os.close(page)
        self.means.threads.shutdown(wait=False)
