"""Where one tenant's models are ready beside its home partition: made as planned, in the background."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from engines import EngineError, Executor
from engines.memory import added
from partitions import Device, PartitionError
from partitions.plan import Granules

from ..control.descriptions import ReadyShare
from ..control.fence import Fence
from ..control.stretch import LentGranules, Wide, WidePartition
from ..link.activity import LenderPage
from ..link.messages import ModelKey, label_of
from ..workers.narrow import NarrowPlacement
from ..workers.placement import Placement, Refusal, close_all
from ..workers.stretching import Measured
from ..workers.wide import WidePlacement, WideStatistics
from ..workers.worker import Worker
from .paged_executor import bound
from .tenant_fence import TenantFence
from .tenant_locks import TenantLocks

lending_log = logging.getLogger("greenlane.lending")
ladder_log = logging.getLogger("greenlane.ladder")


@dataclass(slots=True)
class Means:
    """What placements of all tenants are made with.

    `workers` has each tenant's current worker, with its home placement. `pages` has, by tenant, the descriptor of its page of
    shared memory, and `numbers` the number that each tenant has on these pages. `threads` make what is ready for a move, for
    which no request waits. `refuse` says why a tenant's model may not take as much of the device's memory beside what the
    tenant has; "" if it may.
    """

    device: Device
    workers: Mapping[str, Worker]
    locks: TenantLocks
    pages: dict[str, int]
    numbers: Mapping[str, int]
    max_pause: float
    threads: ThreadPoolExecutor
    refuse: Callable[[str, ModelKey, Mapping[str, int]], str] = lambda *_: ""

    @property
    def too_late(self) -> str:
        return f"an inference on granules of others has been running for {self.max_pause:g} s (server.max_pause)"


class TenantPlacements:
    """Belongs to the event loop. The wide placement closes with the worker that has it; the `ready` ones are kept.

    Executors are made one at a time, each with the tenant's locks, so a move or a load waits for one at most. Those of ready
    placements give way to models that are loaded. A model that is paged out is on no placement.
    """

    def __init__(self, name: str, means: Means) -> None:
        self.ready: dict[Granules, Placement] = {}
        """To these a move only has to switch, once they have all models."""
        self._name = name
        self._means = means
        self._wanted: tuple[Granules, ...] = ()
        self._plan: Wide | None = None
        self._tried: Wide | None = None
        """The plan of `_wide`, or one that could not be carried out, for which there is a `_problem`."""
        self._wide: WidePlacement | None = None
        self._in_use = self._grown = False
        """Of the wide placement as in `TenantFence`."""
        self._changed = self._narrowed = False
        self._problem = ""
        self._too_long: dict[ModelKey, str] = {}
        self._logged: set[ModelKey] = set()
        self._moved: Mapping[str, int] = {}
        self._statistics = WideStatistics()
        self.tenant_fence = TenantFence(name, means.device, means.pages, means.max_pause, self.moved_by_key)
        self._making: asyncio.Task[None] | None = None
        self._again = False
        self._later: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<TenantPlacements of {self._name}: {self._others}>"

    @property
    def worker(self) -> Worker | None:
        """The tenant's current one. Any thread."""
        return self._means.workers.get(self._name)

    def stretch(self, plan: Wide | None) -> None:
        """Have a wide placement by this plan, or none, and use it from now on. Does not wait."""
        self._plan, self._narrowed = plan, False
        if (worker := self.worker) and self._has(worker, plan) and self._wide and self._in_use:
            worker.resume(self._wide)
            self._problem = ""
            return
        self._changed = True
        self.follow()

    def hold(self, wanted: Iterable[Granules]) -> None:
        """Be ready on each of these granules; what else is ready is closed. Does not wait."""
        self._wanted = tuple(map(tuple, wanted))
        self.follow()

    def moved(self, figures: Mapping[str, int]) -> None:
        """A work of each of these models (`name/version`) moves so many bytes of memory. Does not wait."""
        self._moved = figures
        self.tenant_fence.set_moved()

    def moved_by_key(self) -> dict[ModelKey, int]:
        """The same of all models that the tenant has now; 0 where it is not known."""
        worker = self.worker
        return {key: self._moved.get(label_of(key), 0) for key in (list(worker.executors) if worker else ())}

    def fence(self, plan: Fence | None) -> None:
        """Hold the tenant to its share of bandwidth by this plan, or not at all. Does not wait."""
        if self.tenant_fence.set(plan, self.worker):
            self.follow()

    def follow(self) -> None:
        """The tenant's models have changed: make those ready that are not. Does not wait."""
        self._again = True
        needed = self._wanted or self.ready or self._plan or self._tried or self.tenant_fence.needed
        if self._making is None and needed:
            self._making = asyncio.create_task(self._make())
            self._making.add_done_callback(self._made)

    async def settled(self) -> None:
        """Wait until all is made, or cannot be."""
        while self._making:
            await asyncio.wait({self._making})

    async def narrow(self) -> bool:
        """Keep works from the wide placement until `stretch`, and return True when nothing is in flight there; False if that is
        called before.
        """
        self._narrowed = True
        return await _narrow(self.worker)

    def leave(self, keys: Iterable[ModelKey]) -> list[Executor]:
        """These models leave: their executors, for the caller to close. With either of the tenant's locks held."""
        others = self._others
        return [each.executors.pop(key) for key in keys for each in others if key in each.executors]

    def adds(self, key: ModelKey) -> dict[str, int]:
        """The memory that a model takes because it is ready elsewhere, too. Any thread."""
        return added(self._adds(each, key) for each in self._others)

    async def give_way(self, needed: int) -> bool:
        """Have models not ready for a move until so many bytes are free; whether any were. With the lock in `paging`."""
        freed = 0
        for each in sorted(self.ready.values(), key=lambda each: -len(each.partition.granules)):
            if freed < needed and (nbytes := self._nbytes(each)):
                freed += nbytes
                executors, each.executors = list(each.executors.values()), {}
                text = "%s is not ready to switch to granules %s: a model needs the memory"
                ladder_log.info(text, self._name, list(each.partition.granules))
                await asyncio.to_thread(close_all, executors)
        return bool(freed)

    def take(self, granules: Granules) -> Placement | None:
        """The placement of these granules, for the caller to make it the home, if all of the tenant's models are ready there,
        or are paged out. With its locks held.
        """
        placement, worker = self.ready.get(granules), self.worker
        if placement and worker:
            resident = bound(worker.executors)
            if placement.executors.keys() == resident.keys():
                placement.executors |= {key: each for key, each in worker.executors.items() if key not in resident}
                return self.ready.pop(granules)
        return None

    def put(self, placement: Placement) -> None:
        """The tenant does not use this placement after all, or no more. With its locks held."""
        placement.executors = bound(placement.executors)
        self.ready[tuple(placement.partition.granules)] = placement

    def switched(self, left: Placement, granules: Granules) -> None:
        """The tenant's home is another placement now, which was ready; the one that it left is, at least until `hold`."""
        self._wanted = *(each for each in self._wanted if each != granules), tuple(left.partition.granules)
        self.put(left)

    async def close(self) -> None:
        """Close what is ready; the worker closes the rest. With the tenant's locks held, and nothing in flight."""
        self._wanted, self._plan = (), None
        self.tenant_fence.set(None, self.worker)
        if self._making:
            self._making.cancel()
        if self._later:
            self._later.cancel()
        ready, self.ready = list(self.ready.values()), {}
        await asyncio.to_thread(close_all, ready)

    def states(self) -> list[ReadyShare]:
        """What is ready now."""
        return [ReadyShare(key, len(each.executors), self._nbytes(each)) for key, each in self.ready.items()]

    def wide_state(self) -> WidePartition | None:
        """The wide placement, made or planned; None for none."""
        worker = self.worker
        if worker is None or self._tried is None:
            return None
        is_made = self._wide and self._in_use and worker.wide is self._wide
        made = self._wide if is_made else None
        refused = [f"{label_of(key)}: {each.why}" for key, each in made.refused.items()] if made else []
        return WidePartition(
            tuple(made.partition.granules) if made else (),
            [LentGranules(*each) for each in self._tried.lent.items()] if made else [],
            *self._statistics.totals(),
            self._statistics.why_home(),
            list(self._too_long.values()),
            [self._problem] if self._problem else refused,
        )

    def look(self) -> None:
        """Find the models that take too long to run on lent granules. One that was among them the last time too is logged."""
        before, self._too_long = self._too_long, {}
        if (worker := self.worker) and (made := worker.wide):
            for each in worker.too_long():
                self._too_long[each.model] = text = _too_long(each, *made.sizes, made.limit)
                if each.model in before and each.model not in self._logged:
                    self._logged.add(each.model)
                    lending_log.warning("tenant %s: model %s", self._name, text)

    def _made(self, task: "asyncio.Task[None]") -> None:
        self._making = None
        if self.tenant_fence.late and not task.cancelled():
            self._later = asyncio.get_running_loop().call_later(self._means.max_pause, self.follow)
        if not task.cancelled() and (error := task.exception()):
            text = "what %s has beside its share is not made any further: %s"
            ladder_log.error(text, self._name, error, exc_info=error)

    async def _make(self) -> None:
        """Make the narrow placement first, then the wide one, also if others are planned meanwhile; then close what is not
        wanted, before the rest.
        """
        while self._again:
            self._again = False
            while await self._step(self._next_narrow):
                pass
            while await self._step(self._next_wide):
                pass
            for granules in sorted({*self.ready, *self._wanted}, key=self._wanted.__contains__):
                while not self._again and await self._step(partial(self._next_ready, granules)):
                    pass

    async def _step(self, make: Callable[[Worker], Awaitable[bool]]) -> bool:
        """Make one thing, with the tenant's locks; whether there was one to make."""
        async with self._means.locks.both(self._name):
            return (worker := self.worker) is not None and await make(worker)

    async def _next_narrow(self, worker: Worker) -> bool:
        return await self.tenant_fence.make(worker, self._add)

    async def _next_wide(self, worker: Worker) -> bool:
        changed, self._changed = self._changed, False
        if not self._has(worker, self._plan):
            return changed and await self._replace(worker, self._plan)
        if self._wide is None:
            return False
        if await self._add(worker, self._wide):
            self._grown = True
            return True
        if self._grown or not self._in_use:
            await asyncio.to_thread(worker.revoke)
            self._in_use, self._grown = True, False
            if not self._narrowed:
                worker.resume(self._wide)
        return False

    def _has(self, worker: Worker, plan: Wide | None) -> bool:
        """Whether the worker has the wide partition of this plan, or none without one."""
        return plan == self._tried and worker.wide is self._wide and (plan is None) == (worker.wide is None)

    async def _replace(self, worker: Worker, plan: Wide | None) -> bool:
        """Have the wide partition of this plan in place of another one; whether there is one."""
        if before := worker.wide:
            try:
                async with asyncio.timeout(self._means.max_pause):
                    if not await _narrow(worker):
                        return False
            except TimeoutError:  # Its granules did not change hands: `narrow` would have refused that.
                self._problem = self._means.too_late
                text = "tenant %s keeps its wide partition for now, and does not use it: %s"
                lending_log.warning(text, self._name, self._problem)
                return False
            worker.wide = None
            await asyncio.to_thread(before.close)
        self._tried, self._wide, self._problem = plan, None, ""
        self._in_use = self._grown = False
        if plan is None:
            return False
        try:
            worker.wide = self._wide = await asyncio.to_thread(self._carve_wide, worker, plan)
        except PartitionError as error:
            self._problem = f"granules {list(plan.granules)}: {error}"
            text = "tenant %s has no wide partition, and keeps its share as it is: %s"
            lending_log.warning(text, self._name, self._problem)
            return False
        lent = "; ".join(f"{list(granules)} of {lender}" for lender, granules in plan.lent.items())
        lending_log.info("tenant %s may borrow granules %s for up to %g ms a work", self._name, lent, plan.limit * 1e3)
        return True

    def _carve_wide(self, worker: Worker, plan: Wide) -> WidePlacement:
        """Blocks. Raises PartitionError."""
        means = self._means
        lent = [granule for granules in plan.lent.values() for granule in granules]
        partition, sizes = means.device.carve(plan.granules, sorted(lent)), means.device.granules
        try:
            pages = [LenderPage(means.pages[lender], means.numbers[self._name]) for lender in plan.lent]
            units = tuple((lender, sum(sizes[each] for each in granules)) for lender, granules in plan.lent.items())
            return WidePlacement(worker.partition, partition, pages, int(plan.limit * 1e9), self._statistics, units)
        except BaseException:
            partition.close()
            raise

    async def _next_ready(self, granules: Granules, worker: Worker) -> bool:
        if granules not in self._wanted:
            if placement := self.ready.pop(granules, None):
                await asyncio.to_thread(placement.close)
            return False
        if granules == tuple(worker.partition.granules):
            return False
        if placement := self.ready.get(granules):
            return await self._add(worker, placement)
        try:
            self.ready[granules] = await asyncio.get_running_loop().run_in_executor(self._means.threads, self._carve, granules)
        except PartitionError as error:
            ladder_log.warning("tenant %s cannot switch to granules %s: %s", self._name, list(granules), error)
            self._wanted = tuple(each for each in self._wanted if each != granules)
            return False
        return True

    def _carve(self, granules: Granules) -> Placement:
        """Blocks. Raises PartitionError."""
        partition = self._means.device.carve(granules)
        try:
            return Placement(partition, {}, partition.locate())
        except BaseException:
            partition.close()
            raise

    async def _add(self, worker: Worker, placement: Placement) -> bool:
        """Close what models have left on a placement, and make the next one ready there, or find why it is not; whether there
        was one.
        """
        if gone := [key for key in placement.executors if key not in worker.executors]:
            await asyncio.to_thread(close_all, [placement.executors.pop(key) for key in gone])
        placement.refused = {key: each for key, each in placement.refused.items() if key in worker.executors}
        if (key := self._lacking(worker, placement)) is None:
            return False
        loop, threads = asyncio.get_running_loop(), None if isinstance(placement, WidePlacement) else self._means.threads
        try:
            made = await loop.run_in_executor(threads, worker.executors[key].alternate, placement.partition)
            if (adds := _added(made)) and (why := self._means.refuse(self._name, key, adds)):
                await loop.run_in_executor(threads, made.close)
                self._leave_out(placement, key, Refusal(why, adds))
            else:
                placement.executors[key] = made
        except EngineError as error:
            self._leave_out(placement, key, Refusal(str(error)))
        return True

    def _lacking(self, worker: Worker, placement: Placement) -> ModelKey | None:
        """A model that is to be made ready on a placement. On a wide one answers in parts are not, and what had no room there
        has none until the next plan, as it would not give way.
        """
        wide, known = isinstance(placement, WidePlacement), {id(worker.executors.get(key)) for key in placement.executors}
        for key, executor in bound(worker.executors).items():
            if id(executor) not in known and not (wide and executor.engine.signature.in_parts):
                refusal = placement.refused.get(key)
                if refusal is None or (not wide and refusal.adds and not self._means.refuse(self._name, key, refusal.adds)):
                    return key
            known.add(id(executor))  # Others of its keys are for a moment only.
        return None

    def _leave_out(self, placement: Placement, key: ModelKey, refusal: Refusal) -> None:
        if isinstance(placement, NarrowPlacement):
            if not (refusal.adds and key in placement.refused):
                text = "tenant %s: model %s is not held to its memory bandwidth: it is not ready on granules %s: %s"
                ladder_log.warning(text, self._name, label_of(key), list(placement.partition.granules), refusal.why)
        elif isinstance(placement, WidePlacement):
            refusal = refusal._replace(why=f"on its wide partition {refusal.why}") if refusal.adds else refusal
            lending_log.warning("tenant %s: model %s runs on its share only: %s", self._name, label_of(key), refusal.why)
        elif not (refusal.adds and key in placement.refused):
            text = "tenant %s %s to granules %s: model %s: %s"
            cannot = "is not ready to switch" if refusal.adds else "cannot switch"
            ladder_log.warning(text, self._name, cannot, list(placement.partition.granules), label_of(key), refusal.why)
        placement.refused[key] = refusal

    def _adds(self, placement: Placement, key: ModelKey) -> dict[str, int]:
        """What a model adds there. On the tenant's first partition it adds what it would on the present one if that were ready
        for a move, and its own graphs.
        """
        worker, executor = self.worker, placement.executors.get(key)
        if executor is None:
            return {}
        if (adds := _added(executor)) is not None:
            return adds
        present = (_added(worker.executors.get(key)) if worker else None) or {}
        kept = {kind: nbytes for kind, nbytes in present.items() if kind != "graphs"}
        return {**kept, **{kind: nbytes for kind, nbytes in executor.memory.items() if kind == "graphs"}}

    def _nbytes(self, placement: Placement) -> int:
        """The memory that a placement adds."""
        return sum(sum(self._adds(placement, key).values()) for key in placement.executors)

    @property
    def _others(self) -> list[Placement]:
        """All placements but the home. Any thread."""
        sides = (worker.narrow, worker.wide) if (worker := self.worker) else ()
        return [*(each for each in sides if each), *list(self.ready.values())]


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
        f"{label_of(measured.model)} does not run on granules of others: the shortest inference seen {took}, and "
        f"they are lent for {_ms(limit)} ms. Have the lenders lend for more than {_ms(least)} ms (`lend`), or limit its "
        "batches (`max_batch`)"
    )


def _ms(nanoseconds: int) -> str:
    return f"{round(nanoseconds / 1e6, 2 if nanoseconds < 10**8 else 0):g}"


async def _narrow(worker: Worker | None) -> bool:
    """Keep the worker from its wide partition until nothing is in flight there; False if `resume` comes before that."""
    if worker and (wide := worker.wide):
        at_home = wide.suspend()
        await asyncio.wait({asyncio.wrap_future(at_home)})  # If this is cancelled, others wait for the same future still.
        if at_home.cancelled():
            return False
        await asyncio.to_thread(worker.revoke)
    return True
