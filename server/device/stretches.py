"""Wide partitions: those on which tenants of this process may run on granules that other tenants lend.

They are made as planned, get executors for the tenants' models, and are given back.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from engines import EngineError, Executor, ModelRefused
from engines.memory import added
from partitions import Device, PartitionError

from ..control.stretch import Wide, WideState
from ..errors import Conflict
from ..link.activity import LenderPage
from ..link.messages import ModelKey
from ..workers.borrowing import Borrowing, BorrowingStatistics
from ..workers.closing import close_all
from ..workers.stretching import Measured
from ..workers.worker import Worker
from .paged_executor import PagedExecutor
from .tenant_locks import TenantLocks

log = logging.getLogger("greenlane.lending")

LOOK = 5.0
"""Seconds between two looks at which models take too long to go wide."""


class _Tenant:
    """One tenant's plan, the worker for which its wide partition was made, what could not be made, and its statistics."""

    def __init__(self) -> None:
        self.plan: Wide | None = None
        self.worker: Worker | None = None
        self.problem = ""
        self.refused: dict[ModelKey, str] = {}
        self.too_long: dict[ModelKey, str] = {}
        self.logged: set[ModelKey] = set()
        self.statistics = BorrowingStatistics()


class Stretches:
    """The wide partitions of all tenants. Belongs to the event loop.

    `workers` has each tenant's current worker. `pages` has, by lender, the descriptor of its page of shared memory, and
    `numbers` the number that each tenant has on these pages.
    """

    def __init__(
        self,
        device: Device,
        workers: Mapping[str, Worker],
        locks: TenantLocks,
        pages: Mapping[str, int],
        numbers: Mapping[str, int],
        max_pause: float,
    ) -> None:
        self._device = device
        self._workers = workers
        self._locks = locks
        self._pages = pages
        self._numbers = numbers
        self._max_pause = max_pause
        self._tenants: dict[str, _Tenant] = {}
        self._looking: asyncio.TimerHandle | None = None
        self.refuse: Callable[[str, ModelKey, Mapping[str, int]], str] = lambda *_: ""
        """Why a tenant's model may not take as much of the device's memory beside what the tenant has; "" if it may."""

    def __repr__(self) -> str:
        return f"<Stretches of {', '.join(name for name, each in self._tenants.items() if each.plan) or 'no tenant'}>"

    async def narrow(self, names: Collection[str]) -> None:
        """Keep these tenants on their home partitions until `stretch`. Returns once nothing is in flight on the wide ones.

        The tenants are served meanwhile. Raises Conflict if the work of one does not end within `max_pause`; the text names it.
        """
        waiting = {name: asyncio.ensure_future(_narrow(worker)) for name in names if (worker := self._borrower(name))}
        if waiting:
            await asyncio.wait(waiting.values(), timeout=self._max_pause)
        if late := [name for name, at_home in waiting.items() if not at_home.done()]:
            for name in late:
                waiting[name].cancel()
            raise Conflict(f"tenant {late[0]}: {self._too_late()}; nothing was changed")

    async def stretch(self, plans: Mapping[str, Wide]) -> None:
        """Give every tenant the wide partition in `plans`; a tenant without a plan has none. What cannot be made is logged."""
        for name in list(self._workers):
            async with self._locks.both(name):
                if name in self._workers:
                    await self._follow(name, plans.get(name))

    async def follow_models(self, name: str) -> None:
        """Load a tenant's models on its wide partition after they have changed. Its lock in `changing` has to be held."""
        async with self._locks.paging[name]:
            await self.follow_paging(name)

    async def follow_paging(self, name: str) -> None:
        """As `follow_models`, but the lock in `paging` has to be held, too."""
        if (borrowing := self._borrowing(name)) and (worker := self._workers.get(name)):
            found = self._tenants[name]
            gone = [key for key in borrowing.executors if key not in worker.executors]
            await asyncio.to_thread(close_all, [borrowing.executors.pop(key) for key in gone])
            found.refused = {key: why for key, why in found.refused.items() if key in worker.executors}
            if made := await asyncio.to_thread(self._alternates, name, worker, borrowing):
                borrowing.executors |= made
                await asyncio.to_thread(worker.revoke)  # The launch loop may know these models at home alone.
                if not borrowing.suspended:  # A move may have begun meanwhile.
                    worker.widen()

    def leave_models(self, name: str, keys: Iterable[ModelKey]) -> list[Executor]:
        """Remove from the wide partition the executors of these models, which are no longer served; the caller closes them."""
        borrowing = self._borrowing(name)
        return [borrowing.executors.pop(key) for key in keys if key in borrowing.executors] if borrowing else []

    def remove(self, name: str) -> None:
        """Forget a tenant that has gone, whose worker has closed what it had."""
        self._tenants.pop(name, None)

    def close(self) -> None:
        """Stop looking for models that take too long, and close the descriptors of the pages."""
        if self._looking:
            self._looking.cancel()
        for page in self._pages.values():
            os.close(page)

    def states(self) -> list[WideState]:
        """The state of each tenant that has a wide partition, or for which one is planned."""
        found = []
        for name, each in self._tenants.items():
            if each.plan is not None and name in self._workers:
                made = self._borrowing(name)
                granules = tuple(made.partition.granules) if made else ()
                problems = (each.problem,) if each.problem else tuple(each.refused.values())
                lent = each.plan.lent if made else {}
                counts = *each.statistics.totals(), each.statistics.why_home()
                found.append(WideState(name, granules, lent, *counts, tuple(each.too_long.values()), problems))
        return found

    def look(self) -> None:
        """Find the models that take too long to run on lent granules, for `states`.

        A model that was among them the last time too is logged, once.
        """
        for name, found in self._tenants.items():
            before, found.too_long = found.too_long, {}
            if not ((worker := self._workers.get(name)) and (made := worker.borrowing)):
                continue
            for each in worker.too_long():
                found.too_long[each.model] = text = _too_long(each, *made.sizes, made.limit)
                if each.model in before and each.model not in found.logged:
                    found.logged.add(each.model)
                    log.warning("tenant %s: model %s", name, text)
        self._looking = asyncio.get_running_loop().call_later(LOOK, self.look)

    async def _follow(self, name: str, plan: Wide | None) -> None:
        worker, found = self._workers[name], self._tenants.setdefault(name, _Tenant())
        if plan == found.plan and worker is found.worker and worker.borrowing:
            worker.widen()
            found.problem = ""
            return
        if before := worker.borrowing:
            try:
                async with asyncio.timeout(self._max_pause):
                    await _narrow(worker)
            except TimeoutError:  # Its granules did not change hands: `narrow` would have refused that.
                found.problem = self._too_late()
                text = "tenant %s keeps its wide partition for now, and does not use it: %s"
                log.warning(text, name, found.problem)
                return
            worker.borrowing = None
            await asyncio.to_thread(before.close)
        found.plan, found.worker, found.problem = plan, worker, ""
        found.refused.clear()
        if plan is None:
            return
        try:
            made = await asyncio.to_thread(self._make, name, worker, plan, found.statistics)
        except PartitionError as error:
            found.problem = f"granules {list(plan.granules)}: {error}"
            log.warning("tenant %s has no wide partition, and keeps its share as it is: %s", name, found.problem)
            return
        await asyncio.to_thread(worker.stretch, made)
        worker.widen()
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK, self.look)
        lent = "; ".join(f"{list(granules)} of {lender}" for lender, granules in plan.lent.items())
        log.info("tenant %s may borrow granules %s for up to %g ms a work", name, lent, plan.limit * 1e3)

    def _too_late(self) -> str:
        return f"an inference on granules of others has been running for {self._max_pause:g} s (server.max_pause)"

    def _make(self, name: str, worker: Worker, plan: Wide, statistics: BorrowingStatistics) -> Borrowing:
        """Blocks. Raises PartitionError."""
        lent = [granule for granules in plan.lent.values() for granule in granules]
        partition = self._device.carve(plan.granules, sorted(lent))
        try:
            pages = [LenderPage(self._pages[lender], self._numbers[name]) for lender in plan.lent]
            sizes = self._device.granules
            units = tuple((lender, sum(sizes[each] for each in granules)) for lender, granules in plan.lent.items())
            made = Borrowing(worker.partition, partition, {}, pages, int(plan.limit * 1e9), statistics, units)
            made.executors |= self._alternates(name, worker, made)
        except BaseException:
            partition.close()
            raise
        return made

    def _alternates(self, name: str, worker: Worker, borrowing: Borrowing) -> dict[ModelKey, Executor]:
        """Make executors on the wide partition for the models that have none there. Blocks.

        A model that is refused runs on the home partition only.
        """
        made: dict[ModelKey, Executor] = {}
        known = {id(executor) for key, executor in worker.executors.items() if key in borrowing.executors}
        for key, executor in list(worker.executors.items()):
            if (
                isinstance(executor, PagedExecutor)
                or id(executor) in known
                or executor.engine.signature.in_parts
                or key in self._tenants[name].refused
            ):
                continue
            known.add(id(executor))  # Others of its keys are for a moment only.
            alternate: Any = executor
            try:
                made[key] = alternate.alternate(borrowing.partition)
                adds: Any = [each.describe().get("adds") or {} for each in made.values()]
                if adds[-1] and (why := self.refuse(name, key, added(adds))):
                    made.pop(key).close()
                    raise ModelRefused(f"on its wide partition {why}")
            except EngineError as error:
                model = key.rpartition("#")[0]
                self._tenants[name].refused[key] = f"{model}: {error}"
                log.warning("tenant %s: model %s runs on its share only: %s", name, model, error)
        return made

    def _borrower(self, name: str) -> Worker | None:
        worker = self._workers.get(name)
        return worker if worker and worker.borrowing else None

    def _borrowing(self, name: str) -> Borrowing | None:
        worker = self._workers.get(name)
        return worker.borrowing if worker else None


def _too_long(measured: Measured, home: int, wide: int, limit: int) -> str:
    """A text with the model, how long it takes and for how long granules are lent, and what to do."""
    least = measured.least(home, wide)
    took = f"takes {_ms(measured.wide)} ms there" if measured.wide else ""
    took = took or f"takes {_ms(measured.home)} ms on its share, so {_ms(least)} ms there at best"
    return (
        f"{measured.model.rpartition('#')[0]} does not run on granules of others: the shortest inference seen {took}, and "
        f"they are lent for {_ms(limit)} ms. Have the lenders lend for more than {_ms(least)} ms (`lend`), or limit its "
        "batches (`max_batch`)"
    )


def _ms(nanoseconds: int) -> str:
    return f"{round(nanoseconds / 1e6, 2 if nanoseconds < 10**8 else 0):g}"


async def _narrow(worker: Worker) -> None:
    """Keep the worker from its wide partition, and return when nothing is in flight there."""
    if borrowing := worker.borrowing:
        await asyncio.wrap_future(borrowing.narrow())
        await asyncio.to_thread(worker.revoke)
