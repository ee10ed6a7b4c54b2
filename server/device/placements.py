"""Where tenants' models are ready beside their home partitions; see `server.control.device_runtime.Widths`.

A tenant's wide placement has granules that other tenants lend. The others are ready for a move, which then only has to switch.
All are made in one way: a partition, and on it an alternate of each executor at home, within the tenant's budget.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engines import EngineError, Executor
from engines.memory import added
from engines.thread_priority import lower_priority
from partitions import Device, PartitionError
from partitions.plan import Granules

from ..control.descriptions import RungState
from ..control.stretch import Wide, WideState
from ..errors import Conflict
from ..link.activity import LenderPage
from ..link.messages import ModelKey
from ..workers.borrowing import Borrowing, BorrowingStatistics
from ..workers.closing import close_all
from ..workers.placement import Placement, Refusal
from ..workers.stretching import Measured
from ..workers.worker import Worker
from .paged_executor import bound
from .tenant_locks import TenantLocks

lending_log = logging.getLogger("greenlane.lending")
ladder_log = logging.getLogger("greenlane.ladder")

LOOK = 5.0
"""Seconds between two looks at which models take too long to go wide."""
T = TypeVar("T")


class _Tenant:
    """One tenant's plans, and what was made of them.

    `wide` is the plan of its wide placement, and `worker` the one that has it: it closes with it. `ready` are the placements of
    the granules that are `wanted`, and that it does not have.
    """

    def __init__(self) -> None:
        self.wide: Wide | None = None
        self.worker: Worker | None = None
        self.problem = ""
        self.too_long: dict[ModelKey, str] = {}
        self.logged: set[ModelKey] = set()
        self.statistics = BorrowingStatistics()
        self.wanted: tuple[Granules, ...] = ()
        self.ready: dict[Granules, Placement] = {}


class Placements:
    """Belongs to the event loop. `workers` has each tenant's current worker, with its home placement.

    `pages` has, by lender, the descriptor of its page of shared memory, and `numbers` the number that each tenant has on these
    pages. Executors are made one at a time, with the tenant's locks: on a GPU on a thread at low priority, on CPU cores at
    normal priority, which the threads of a session would keep. A move or a load waits for one of those that are to be ready for
    a move; these also give way to models that are loaded. A model that is paged out is on no placement.
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
        self.refuse: Callable[[str, ModelKey, Mapping[str, int]], str] = lambda *_: ""
        """Why a tenant's model may not take as much of the device's memory beside what the tenant has; "" if it may."""
        self._threads = ThreadPoolExecutor(1, "placements", lower_priority if device.kind == "cuda" else None)
        self._looking: asyncio.TimerHandle | None = None
        self._making: asyncio.Task[None] | None = None
        self._again = False

    def __repr__(self) -> str:
        return f"<Placements {'; '.join(f'{name}: {self._others(name)}' for name in self._tenants) or 'of no tenant'}>"

    async def narrow(self, tenants: Collection[str]) -> None:
        waiting = {name: asyncio.ensure_future(_narrow(worker)) for name in tenants if (worker := self._borrower(name))}
        if waiting:
            await asyncio.wait(waiting.values(), timeout=self._max_pause)
        if late := [name for name, at_home in waiting.items() if not at_home.done()]:
            for name in late:
                waiting[name].cancel()
            raise Conflict(f"tenant {late[0]}: {self._too_late()}; nothing was changed")

    async def stretch(self, plans: Mapping[str, Wide]) -> None:
        for name in list(self._workers):
            async with self._locks.both(name):
                if name in self._workers:
                    await self._stretch(name, plans.get(name))

    async def hold(self, rungs: Mapping[str, Sequence[Granules]]) -> list[RungState]:
        for name in {*self._tenants, *rungs}:
            self._of(name).wanted = tuple(map(tuple, rungs.get(name, ())))
        self._begin()
        await self.settled()
        return [
            RungState(name, granules, len(placement.executors), self._nbytes(name, placement))
            for name, tenant in self._tenants.items()
            for granules, placement in tenant.ready.items()
        ]

    async def settled(self) -> None:
        """Wait until all placements that are to be ready for a move are made, or cannot be."""
        while self._making:
            await asyncio.wait({self._making})

    async def stretches(self) -> list[WideState]:
        found = []
        for name, tenant in self._tenants.items():
            if tenant.wide is not None and (worker := self._workers.get(name)):
                made = worker.borrowing.placement if worker.borrowing and worker is tenant.worker else None
                granules = tuple(made.partition.granules) if made else ()
                refused = [f"{_name(key)}: {each.why}" for key, each in made.refused.items()] if made else []
                problems = (tenant.problem,) if tenant.problem else tuple(refused)
                lent = tenant.wide.lent if made else {}
                counts = *tenant.statistics.totals(), tenant.statistics.why_home()
                found.append(WideState(name, granules, lent, *counts, tuple(tenant.too_long.values()), problems))
        return found

    async def follow(self, name: str) -> None:
        """A tenant's models have changed: make those ready that are not. Its lock in `changing` has to be held."""
        async with self._locks.paging[name]:
            await self.follow_paging(name)

    async def follow_paging(self, name: str) -> None:
        """As `follow`, but the lock in `paging` has to be held, too."""
        if worker := self._borrower(name):
            made = await self._fill(name, worker)
            if made and worker.borrowing and not worker.borrowing.suspended:  # A move may have begun meanwhile.
                worker.widen()
        self._begin()

    def ready(self, name: str) -> Mapping[Granules, Placement]:
        """The placements of a tenant to which a move only has to switch, or will when they have all its models."""
        tenant = self._tenants.get(name)
        return tenant.ready if tenant else {}

    def leave(self, name: str, keys: Iterable[ModelKey]) -> list[Executor]:
        """These models leave: their executors, for the caller to close. With either of the tenant's locks held."""
        others = self._others(name)
        return [each.executors.pop(key) for key in keys for each in others if key in each.executors]

    def adds(self, name: str, key: ModelKey) -> dict[str, int]:
        """The memory that a tenant's model takes because it is ready elsewhere, too. Any thread."""
        return added(self._adds(name, each, key) for each in self._others(name))

    async def give_way(self, name: str, needed: int) -> bool:
        """Have models not ready for a move until so many bytes are free; whether any were. With its lock in `paging`."""
        freed = 0
        for each in sorted(self.ready(name).values(), key=lambda each: -len(each.partition.granules)):
            if freed < needed and (nbytes := self._nbytes(name, each)):
                freed += nbytes
                executors, each.executors = list(each.executors.values()), {}
                text = "%s is not ready to switch to granules %s: a model needs the memory"
                ladder_log.info(text, name, list(each.partition.granules))
                await asyncio.to_thread(close_all, executors)
        return bool(freed)

    def take(self, name: str, granules: Granules) -> Placement | None:
        """The placement of these granules, for the caller to make it the home, if all of the tenant's models are ready there,
        or are paged out. With its locks held.
        """
        tenant, worker = self._tenants.get(name), self._workers.get(name)
        if tenant and worker and (placement := tenant.ready.get(granules)):
            resident = bound(worker.executors)
            if placement.executors.keys() == resident.keys():
                placement.executors |= {key: each for key, each in worker.executors.items() if key not in resident}
                return tenant.ready.pop(granules)
        return None

    def put(self, name: str, placement: Placement) -> None:
        """The tenant does not use this placement after all, or no more. With its locks held."""
        placement.executors = bound(placement.executors)
        self._of(name).ready[tuple(placement.partition.granules)] = placement

    def switched(self, name: str, left: Placement, granules: Granules) -> None:
        """The tenant's home is another placement now, which was ready; the one that it left is, at least until `hold`."""
        tenant = self._of(name)
        tenant.wanted = *(each for each in tenant.wanted if each != granules), tuple(left.partition.granules)
        self.put(name, left)

    async def remove(self, name: str) -> None:
        """This tenant goes: close what it has ready; its worker closes the rest. With its locks held."""
        if tenant := self._tenants.pop(name, None):
            await self._close_ready([tenant])

    async def close(self) -> None:
        """Close what is ready, and the pages; all tenants' locks are held, and nothing is in flight."""
        for each in (self._looking, self._making):
            if each:
                each.cancel()
        await self._close_ready(self._tenants.values())
        for page in self._pages.values():
            os.close(page)
        self._threads.shutdown(wait=False)

    def look(self) -> None:
        """Find the models that take too long to run on lent granules, for `stretches`.

        A model that was among them the last time too is logged, once.
        """
        for name, tenant in self._tenants.items():
            before, tenant.too_long = tenant.too_long, {}
            if (worker := self._borrower(name)) and (made := worker.borrowing):
                for each in worker.too_long():
                    tenant.too_long[each.model] = text = _too_long(each, *made.sizes, made.limit)
                    if each.model in before and each.model not in tenant.logged:
                        tenant.logged.add(each.model)
                        lending_log.warning("tenant %s: model %s", name, text)
        self._looking = asyncio.get_running_loop().call_later(LOOK, self.look)

    async def _stretch(self, name: str, plan: Wide | None) -> None:
        worker, tenant = self._workers[name], self._of(name)
        if plan == tenant.wide and worker is tenant.worker and worker.borrowing:
            worker.widen()
            tenant.problem = ""
            return
        if before := worker.borrowing:
            try:
                async with asyncio.timeout(self._max_pause):
                    await _narrow(worker)
            except TimeoutError:  # Its granules did not change hands: `narrow` would have refused that.
                tenant.problem = self._too_late()
                text = "tenant %s keeps its wide partition for now, and does not use it: %s"
                lending_log.warning(text, name, tenant.problem)
                return
            worker.borrowing = None
            await asyncio.to_thread(before.close)
        tenant.wide, tenant.worker, tenant.problem = plan, None, ""
        if plan is None:
            return
        try:
            worker.borrowing = await self._run(self._borrow, name, worker, plan, tenant.statistics)
        except PartitionError as error:
            tenant.problem = f"granules {list(plan.granules)}: {error}"
            lending_log.warning("tenant %s has no wide partition, and keeps its share as it is: %s", name, tenant.problem)
            return
        await self._fill(name, worker)
        tenant.worker = worker
        worker.widen()
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK, self.look)
        lent = "; ".join(f"{list(granules)} of {lender}" for lender, granules in plan.lent.items())
        lending_log.info("tenant %s may borrow granules %s for up to %g ms a work", name, lent, plan.limit * 1e3)

    def _borrow(self, name: str, worker: Worker, plan: Wide, statistics: BorrowingStatistics) -> Borrowing:
        """Blocks. Raises PartitionError."""
        lent = [granule for granules in plan.lent.values() for granule in granules]
        wide, sizes = Placement(self._device.carve(plan.granules, sorted(lent)), {}), self._device.granules
        try:
            pages = [LenderPage(self._pages[lender], self._numbers[name]) for lender in plan.lent]
            units = tuple((lender, sum(sizes[each] for each in granules)) for lender, granules in plan.lent.items())
            return Borrowing(worker.partition, wide, pages, int(plan.limit * 1e9), statistics, units)
        except BaseException:
            wide.close()
            raise

    async def _fill(self, name: str, worker: Worker) -> bool:
        """Have all models ready on the wide placement that can be; whether one has come. With the tenant's locks."""
        assert worker.borrowing
        wide = worker.borrowing.placement
        before = {*wide.executors}
        while await self._add(name, worker, wide):
            pass
        if come := not wide.executors.keys() <= before:  # The launch loop may know these models at home alone.
            await asyncio.to_thread(worker.revoke)
        return come

    def _begin(self) -> None:
        """Models, or what is wanted, have changed: make what is to be ready for a move. Does not wait."""
        self._again = True
        if self._making is None and any(each.wanted or each.ready for each in self._tenants.values()):
            self._making = asyncio.create_task(self._make_all())
            self._making.add_done_callback(self._made)

    def _made(self, task: "asyncio.Task[None]") -> None:
        self._making = None
        if not task.cancelled() and (error := task.exception()):
            ladder_log.error("ladders are not made any further: %s", error, exc_info=error)

    async def _make_all(self) -> None:
        while self._again:
            self._again = False
            for name, tenant in list(self._tenants.items()):
                await self._make(name, tenant)

    async def _make(self, name: str, tenant: _Tenant) -> None:
        """Close what is ready and not wanted, and make what is, step by step."""
        for granules, placement in list(tenant.ready.items()):
            if granules not in tenant.wanted:
                async with self._locks.both(name):
                    if tenant.ready.get(granules) is placement:
                        del tenant.ready[granules]
                        await asyncio.to_thread(placement.close)
        for granules in tenant.wanted:
            step = True
            while step:
                async with self._locks.both(name):
                    step = await self._next(name, tenant, granules)

    async def _next(self, name: str, tenant: _Tenant, granules: Granules) -> bool:
        """Make a placement's partition, or the next model ready there; whether there was anything to make."""
        worker = self._workers.get(name)
        if worker is None or granules not in tenant.wanted or granules == tuple(worker.partition.granules):
            return False
        if placement := tenant.ready.get(granules):
            return await self._add(name, worker, placement)
        try:
            tenant.ready[granules] = await self._run(self._carve, granules)
        except PartitionError as error:
            ladder_log.warning("tenant %s cannot switch to granules %s: %s", name, list(granules), error)
            tenant.wanted = tuple(each for each in tenant.wanted if each != granules)
            return False
        return True

    def _carve(self, granules: Granules) -> Placement:
        """Blocks. Raises PartitionError."""
        partition = self._device.carve(granules)
        try:
            return Placement(partition, {}, partition.locate())
        except BaseException:
            partition.close()
            raise

    async def _add(self, name: str, worker: Worker, placement: Placement) -> bool:
        """Close what models have left on a placement, and make the next one ready there, or find why it is not; whether there
        was one.
        """
        if gone := [key for key in placement.executors if key not in worker.executors]:
            await asyncio.to_thread(close_all, [placement.executors.pop(key) for key in gone])
        placement.refused = {key: each for key, each in placement.refused.items() if key in worker.executors}
        if (key := self._lacking(name, worker, placement)) is None:
            return False
        try:
            made = await self._run(worker.executors[key].alternate, placement.partition)
            if (adds := _added(made)) and (why := self.refuse(name, key, adds)):
                await self._run(made.close)
                self._leave_out(name, worker, placement, key, Refusal(why, adds))
            else:
                placement.executors[key] = made
        except EngineError as error:
            self._leave_out(name, worker, placement, key, Refusal(str(error)))
        return True

    def _lacking(self, name: str, worker: Worker, placement: Placement) -> ModelKey | None:
        """A model that is to be made ready on a placement. On a wide one answers in parts are not, and what had no room there
        has none until the next plan, as it would not give way.
        """
        wide = _is_wide(worker, placement)
        known = {id(worker.executors.get(key)) for key in placement.executors}
        for key, executor in bound(worker.executors).items():
            if id(executor) not in known and not (wide and executor.engine.signature.in_parts):
                refusal = placement.refused.get(key)
                if refusal is None or (not wide and refusal.adds and not self.refuse(name, key, refusal.adds)):
                    return key
            known.add(id(executor))  # Others of its keys are for a moment only.
        return None

    def _leave_out(self, name: str, worker: Worker, placement: Placement, key: ModelKey, refusal: Refusal) -> None:
        if _is_wide(worker, placement):
            refusal = refusal._replace(why=f"on its wide partition {refusal.why}") if refusal.adds else refusal
            lending_log.warning("tenant %s: model %s runs on its share only: %s", name, _name(key), refusal.why)
        elif not (refusal.adds and key in placement.refused):
            text = "tenant %s %s to granules %s: model %s: %s"
            cannot = "is not ready to switch" if refusal.adds else "cannot switch"
            ladder_log.warning(text, name, cannot, list(placement.partition.granules), _name(key), refusal.why)
        placement.refused[key] = refusal

    def _adds(self, name: str, placement: Placement, key: ModelKey) -> dict[str, int]:
        """What a model adds there. On the tenant's first partition it adds what it would on the present one if that were ready
        for a move, and its own graphs.
        """
        worker, executor = self._workers.get(name), placement.executors.get(key)
        if executor is None:
            return {}
        if (adds := _added(executor)) is not None:
            return adds
        present = (_added(worker.executors.get(key)) if worker else None) or {}
        kept = {kind: nbytes for kind, nbytes in present.items() if kind != "graphs"}
        return {**kept, **{kind: nbytes for kind, nbytes in executor.memory.items() if kind == "graphs"}}

    def _nbytes(self, name: str, placement: Placement) -> int:
        """The memory that a placement adds."""
        return sum(sum(self._adds(name, placement, key).values()) for key in placement.executors)

    def _others(self, name: str) -> list[Placement]:
        """All placements of a tenant but its home. Any thread."""
        worker = self._borrower(name)
        wide = [worker.borrowing.placement] if worker and worker.borrowing else []
        return [*wide, *self.ready(name).values()]

    def _borrower(self, name: str) -> Worker | None:
        worker = self._workers.get(name)
        return worker if worker and worker.borrowing else None

    def _of(self, name: str) -> _Tenant:
        return self._tenants.setdefault(name, _Tenant())

    def _too_late(self) -> str:
        return f"an inference on granules of others has been running for {self._max_pause:g} s (server.max_pause)"

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _close_ready(self, tenants: Iterable[_Tenant]) -> None:
        ready: list[Placement] = []
        for each in tenants:
            ready += each.ready.values()
            each.wanted, each.ready = (), {}
        await asyncio.to_thread(close_all, ready)


def _is_wide(worker: Worker, placement: Placement) -> bool:
    return worker.borrowing is not None and worker.borrowing.placement is placement


def _name(key: ModelKey) -> str:
    """A model and its version, as problems and the log name it."""
    return key.rpartition("#")[0]


def _added(executor: Executor | None) -> dict[str, int] | None:
    """What an alternate takes; None for another executor."""
    adds = executor.describe().get("adds") if executor else None
    return dict(adds) if isinstance(adds, dict) else None


def _too_long(measured: Measured, home: int, wide: int, limit: int) -> str:
    """A text with the model, how long it takes and for how long granules are lent, and what to do."""
    least = measured.least(home, wide)
    took = f"takes {_ms(measured.wide)} ms there" if measured.wide else ""
    took = took or f"takes {_ms(measured.home)} ms on its share, so {_ms(least)} ms there at best"
    return (
        f"{_name(measured.model)} does not run on granules of others: the shortest inference seen {took}, and "
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
