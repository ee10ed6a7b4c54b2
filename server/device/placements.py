"""Where the models of this process's tenants are ready beside their home partitions.

A tenant's wide placement has granules of other tenants too, its narrow one a part of its own. The others are ready for a move,
which then only has to switch.
All are made in one way: a partition, and on it an alternate of each executor at home, within the tenant's budget.
"""

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from engines import Executor
from engines.memory import added
from engines.thread_priority import lower_priority
from partitions import Device
from partitions.plan import Granules

from ..control.descriptions import Beside, ReadyShare
from ..control.fence import Fence
from ..control.stretch import Wide
from ..errors import Conflict
from ..link.messages import ModelKey
from ..workers.pace import Pace
from ..workers.worker import Worker
from .roles import TenantFence, TenantLadder, TenantStretch
from .side import Means, Role
from .tenant_locks import TenantLocks

LOOK = 5.0
"""Seconds between two looks at which models take too long to go wide."""


class TenantPlacements:
    """What one tenant has beside its home, in each role: made as planned, in the background. Belongs to the event loop.

    Executors are made one at a time, each with the tenant's locks, so a move or a load waits for one at most.
    """

    def __init__(self, name: str, means: Means) -> None:
        self.fence = TenantFence(name, means)
        self.stretch = TenantStretch(name, means)
        self.ladder = TenantLadder(name, means)
        self._roles: tuple[Role, ...] = self.fence, self.stretch, self.ladder
        """In the order in which they are made."""
        self._name = name
        self._means = means
        self._making: asyncio.Task[None] | None = None
        self._again = False
        self._later: asyncio.TimerHandle | None = None

    def plan(self, wide: Wide | None, fence: Fence | None) -> None:
        """Have the placements of these plans, or none. Does not wait."""
        changed = self.stretch.set(wide), self.fence.set(fence)
        if any(changed):
            self.follow()

    def hold(self, wanted: Iterable[Granules]) -> None:
        """Be ready for moves to each of these granules; what else is ready is closed. Does not wait."""
        self.ladder.set(wanted)
        self.follow()

    def follow(self) -> None:
        """The tenant's models have changed: make those ready that are not. Does not wait."""
        self._again = True
        if self._making is None and any(role.needed for role in self._roles):
            self._making = asyncio.create_task(self._make())
            self._making.add_done_callback(self._made)

    async def settled(self) -> None:
        """Wait until all is made, or cannot be."""
        while self._making:
            await asyncio.wait({self._making})

    def leave(self, keys: Iterable[ModelKey]) -> list[Executor]:
        """These models leave: their executors, for the caller to close. With either of the tenant's locks held."""
        others = [each for role in self._roles for each in role.placements]
        return [each.executors.pop(key) for key in keys for each in others if key in each.executors]

    def adds(self, key: ModelKey) -> dict[str, int]:
        """The memory that a model takes because it is ready elsewhere, too. Any thread."""
        return added(role.adds(each, key) for role in self._roles for each in role.placements)

    async def close(self) -> None:
        """Close what is ready; the worker closes the rest. With the tenant's locks held, and nothing in flight."""
        self.fence.set(None)
        self.stretch.set(None)
        if self._making:
            self._making.cancel()
        if self._later:
            self._later.cancel()
        await self.ladder.close()

    def state(self) -> Beside:
        """What there is now."""
        return Beside(self.stretch.state(), self.fence.state(), self.ladder.state())

    def _made(self, task: "asyncio.Task[None]") -> None:
        self._making = None
        if any(role.late for role in self._roles) and not task.cancelled():
            self._later = asyncio.get_running_loop().call_later(self._means.max_pause, self.follow)
        if not task.cancelled() and (error := task.exception()):
            text = "what %s has beside its share is not made any further: %s"
            self.ladder.log.error(text, self._name, error, exc_info=error)

    async def _make(self) -> None:
        """Make what each role lacks; before the ladder goes on, what the others lack by now."""
        while self._again:
            self._again = False
            for role in self._roles:
                while await self._step(role) and not (role is self.ladder and self._again):
                    pass

    async def _step(self, role: Role) -> bool:
        """Make one thing, with the tenant's locks; whether there was one to make."""
        async with self._means.locks.both(self._name):
            return (worker := self._means.workers.get(self._name)) is not None and await role.make(worker)


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
