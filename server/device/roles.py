"""What one tenant has beside its home, by role: the fence that holds it, what it borrows, and where it is ready for a move."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from engines import Executor
from partitions import Partition, PartitionError
from partitions.plan import Granules

from ..control.descriptions import ReadyShare
from ..control.fence import Fence, FencedModel, FencedTenant
from ..control.stretch import LentGranules, Wide, WidePartition
from ..link.activity import ActivityPage, LenderPage
from ..link.messages import ModelKey, label_of
from ..workers.narrow import NarrowPlacement, NarrowStatistics
from ..workers.pace import Pace
from ..workers.placement import Placement, Refusal, close_all
from ..workers.stretching import Measured
from ..workers.wide import WidePlacement, WideStatistics
from ..workers.worker import Worker
from .paged_executor import bound
from .side import Means, Role, Side


class TenantFence(Side[Fence, NarrowPlacement]):
    """What holds it to its shares of bandwidth: a narrow placement, and a pace. Belongs to the event loop."""

    role = "narrow"
    log = logging.getLogger("greenlane.fence")
    called = "narrow placement"
    without = "so nothing holds its memory bandwidth"
    holds = True

    def __init__(self, name: str, means: Means) -> None:
        super().__init__(name, means)
        self._moved: Mapping[str, int] = {}
        self.pace: Pace | None = None
        """Of all of the tenant's workers."""
        self._waited = 0
        """Works that waited for a pace that it had before."""
        self._statistics = NarrowStatistics()

    def set(self, plan: Fence | None) -> bool:
        """As for any role, and have the pace of this plan."""
        if plan != self._plan:
            self._set_pace(plan)
        if worker := self.worker:
            worker.pace = self.pace
        return super().set(plan)

    def reopen_page(self, tenant: str) -> bool:
        """A tenant has another page than before, or none any more; whether `make` has to be called for that."""
        if self._plan is None or tenant not in self._plan.neighbours:
            return False
        self._set_pace(self._plan)
        return self.set(self._plan)

    def moved(self, figures: Mapping[str, int]) -> None:
        """A work of each of these models (`name/version`) moves so many bytes of memory; below 0 it is held anyway."""
        self._moved = figures
        if self._made:
            self._made.set_moved(self.moved_by_key())

    def moved_by_key(self) -> dict[ModelKey, int]:
        """The same of all models that the tenant has now; 0 where it is not known."""
        worker = self.worker
        return {key: self._moved.get(label_of(key), 0) for key in (list(worker.executors) if worker else ())}

    def hand_over(self, before: Worker, after: Worker) -> bool:
        """The tenant goes on with another worker, and the one before has halted: give that one its narrow placement if it is a
        part of its home, too. Returns whether it is; `Worker.revoke` lets the launch loop know, later. Otherwise the tenant is
        held again once it has another, by a plan for what it has now.
        """
        narrow = before.narrow
        if narrow is None or not set(narrow.partition.granules) < set(after.partition.granules):
            return False
        before.narrow, after.narrow = None, narrow
        return True

    def state(self) -> FencedTenant | None:
        """What holds the tenant now; None if nothing is planned to."""
        plan, made = self._plan, self.used
        if plan is None or self.worker is None:
            return None
        return FencedTenant(
            plan.memory,
            tuple(made.partition.granules) if made else (),
            self._statistics.launches,
            plan.pcie,
            self._waited + (self.pace.waits if self.pace else 0),
            list(plan.notes),
            self.problems,
            _known(made) if made else [],
            paced=bool(plan.paced),
        )

    def _set_pace(self, plan: Fence | None) -> None:
        """Have the pace of this plan. The same one goes on, with what it has counted and what pays to it."""
        if not (plan and (plan.pcie or plan.paced)):
            if self.pace:
                self._waited += self.pace.waits
                self.pace.hurry()
            self.pace = None
        elif self.pace is None:
            self.pace = Pace(self._open_pages(plan), plan.pcie, plan.paced)
        else:
            self.pace.hold(self._open_pages(plan), plan.pcie, plan.paced)

    def _open_pages(self, plan: Fence) -> list[ActivityPage]:
        pages = self._means.pages
        return [ActivityPage(pages[name]) for name in plan.neighbours if name in pages]

    async def _open(self, worker: Worker, plan: Fence) -> NarrowPlacement:
        if not set(plan.granules) <= set(worker.partition.granules):
            raise PartitionError("the tenant has others now, for which there is another plan soon")

        def make(partition: Partition) -> NarrowPlacement:
            return NarrowPlacement(partition, (), plan.memory, self._statistics)

        made = await asyncio.to_thread(self._means.place, plan.granules, (), make)
        text = "tenant %s is held to %.4g GB/s of memory bandwidth while others are at work: on granules %s what draws more"
        self.log.info(text, self._name, plan.memory / 1e9, list(plan.granules))
        return made

    def _does_for(self, plan: Fence) -> bool:
        return self._tried is not None and plan.granules == self._tried.granules

    def _renew(self, made: NarrowPlacement) -> None:
        if self._plan:
            made.hold(self._open_pages(self._plan), self._plan.memory)
        made.set_moved(self.moved_by_key())


def _known(narrow: NarrowPlacement) -> list[FencedModel]:
    """What is known of the models on a placement; a model that is being loaded again is there twice for a moment."""
    return [
        FencedModel(label_of(key), abs(each.moved), round(each.home / 1e6, 4), round(each.narrow / 1e6, 4), each.moved < 0)
        for key, each in narrow.measured().items()
        if key in narrow.executors
    ]


class TenantStretch(Side[Wide, WidePlacement]):
    """What it borrows: a wide placement, and which models take too long there. `pause` comes before a move of granules that it
    borrows. Belongs to the event loop.
    """

    role = "wide"
    log = logging.getLogger("greenlane.lending")
    called = "wide partition"
    without = "and runs on its share only"
    over = "on its wide partition "
    where = "on granules of others"

    def __init__(self, name: str, means: Means) -> None:
        super().__init__(name, means)
        self._threads = None
        self._statistics = WideStatistics()
        self._too_long: dict[ModelKey, str] = {}
        self._logged: set[ModelKey] = set()

    def state(self) -> WidePartition | None:
        """The wide placement, made or planned; None for none."""
        tried, made = self._tried, self.used
        if tried is None or self.worker is None:
            return None
        return WidePartition(
            tuple(made.partition.granules) if made else (),
            [LentGranules(*each) for each in tried.lent.items()] if made else [],
            self._statistics.launches,
            self._statistics.returns,
            self._statistics.why_home(),
            list(self._too_long.values()),
            self.problems,
        )

    def look(self) -> None:
        """Find the models that take too long to run on lent granules. One that was among them the last time too is logged."""
        before, self._too_long = self._too_long, {}
        if (worker := self.worker) and (made := worker.wide):
            for each in worker.too_long():
                self._too_long[each.model] = text = _too_long(each, *made.sizes, made.limit)
                if each.model in before and each.model not in self._logged:
                    self._logged.add(each.model)
                    self.log.warning("tenant %s: model %s", self._name, text)

    def _wants(self, key: ModelKey, executor: Executor, refusal: Refusal | None) -> bool:
        """Not for answers in parts. What had no room there has none until the next plan, as it would not give way."""
        return refusal is None and not executor.engine.signature.in_parts

    async def _open(self, worker: Worker, plan: Wide) -> WidePlacement:
        means, sizes, limit = self._means, self._means.device.granules, int(plan.limit * 1e9)
        pages = [LenderPage(means.pages[lender], means.numbers[self._name]) for lender in plan.lent]
        units = tuple((lender, sum(sizes[each] for each in granules)) for lender, granules in plan.lent.items())
        lent = sorted(granule for granules in plan.lent.values() for granule in granules)

        def make(partition: Partition) -> WidePlacement:
            return WidePlacement(worker.partition, partition, pages, limit, self._statistics, units)

        made = await asyncio.to_thread(means.place, plan.granules, lent, make)
        lenders = "; ".join(f"{list(granules)} of {lender}" for lender, granules in plan.lent.items())
        self.log.info("tenant %s may borrow granules %s for up to %g ms a work", self._name, lenders, plan.limit * 1e3)
        return made


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


class TenantLadder(Role):
    """Where it is ready for a move, which then only has to switch. What is ready is kept until `set`; its models give way to
    models that are loaded. Belongs to the event loop.
    """

    log = logging.getLogger("greenlane.ladder")
    without = "so the tenant cannot just switch to them"

    def __init__(self, name: str, means: Means) -> None:
        super().__init__(name, means)
        self.ready: dict[Granules, Placement] = {}
        """To these a move only has to switch, once they have all models."""
        self._wanted: tuple[Granules, ...] = ()

    @property
    def placements(self) -> list[Placement]:
        return list(self.ready.values())

    @property
    def needed(self) -> bool:
        return bool(self._wanted or self.ready)

    def set(self, wanted: Iterable[Granules]) -> None:
        """Be ready on each of these granules once `make` is called; what else is ready is closed."""
        self._wanted = tuple(map(tuple, wanted))

    async def make(self, worker: Worker) -> bool:
        """Close what is not wanted, before the rest is made."""
        for granules in self.ready.keys() - set(self._wanted):
            await asyncio.to_thread(self.ready.pop(granules).close)
        for granules in self._wanted:
            if granules != tuple(worker.partition.granules) and await self._make_on(granules, worker):
                return True
        return False

    async def give_way(self, needed: int) -> bool:
        """Have models not ready for a move until so many bytes are free; whether any were. With the lock in `paging`."""
        freed = 0
        for each in sorted(self.ready.values(), key=lambda each: -len(each.partition.granules)):
            if freed < needed and (nbytes := self._nbytes(each)):
                freed += nbytes
                executors, each.executors = list(each.executors.values()), {}
                text = "%s is not ready to switch to granules %s: a model needs the memory"
                self.log.info(text, self._name, list(each.partition.granules))
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
        """The tenant's home is another placement now, which was ready; the one that it left is, at least until `set`."""
        self._wanted = *(each for each in self._wanted if each != granules), tuple(left.partition.granules)
        self.put(left)

    async def close(self) -> None:
        """Close what is ready. With the tenant's locks held, and nothing in flight."""
        self._wanted = ()
        ready, self.ready = self.placements, {}
        await asyncio.to_thread(close_all, ready)

    def state(self) -> list[ReadyShare]:
        """What there is now."""
        return [ReadyShare(key, len(each.executors), self._nbytes(each)) for key, each in self.ready.items()]

    async def _make_on(self, granules: Granules, worker: Worker) -> bool:
        """Make the next thing on these granules; whether there was one."""
        if placement := self.ready.get(granules):
            return await self._add(worker, placement)
        try:
            self.ready[granules] = await asyncio.get_running_loop().run_in_executor(self._threads, self._place, granules)
        except PartitionError as error:
            self.log.warning("tenant %s cannot switch to granules %s: %s", self._name, list(granules), error)
            self._wanted = tuple(each for each in self._wanted if each != granules)
            return False
        return True

    def _place(self, granules: Granules) -> Placement:
        """Blocks. Raises PartitionError."""
        return self._means.place(granules, (), lambda partition: Placement(partition, {}, partition.locate()))

    def _nbytes(self, placement: Placement) -> int:
        """The memory that a placement adds."""
        return sum(sum(self.adds(placement, key).values()) for key in placement.executors)
