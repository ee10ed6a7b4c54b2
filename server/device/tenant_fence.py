"""What holds one tenant to its share of bandwidth: its narrow placement, made as planned, and its pace over PCIe."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from partitions import Device, PartitionError

from ..control.fence import Fence, FencedModel, FencedTenant
from ..link.activity import ActivityPage
from ..link.messages import ModelKey, label_of
from ..workers.narrow import NarrowPlacement, NarrowStatistics
from ..workers.pace import Pace
from ..workers.placement import Placement
from ..workers.worker import Worker

log = logging.getLogger("greenlane.fence")

Add = Callable[[Worker, Placement], Awaitable[bool]]
"""Makes the next model ready on a placement; whether there was one."""


class TenantFence:
    """Belongs to the event loop. The narrow placement closes with the worker that has it, unless that hands it over.

    `pages` has, by tenant, the descriptor of its page of shared memory; `reopen_page` when one has changed. `moved` says what
    a work of each model that this tenant has now moves, in bytes.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        pages: Mapping[str, int],
        max_pause: float,
        moved: Callable[[], Mapping[ModelKey, int]],
    ) -> None:
        self._name = name
        self._device = device
        self._pages = pages
        self._max_pause = max_pause
        self._moved = moved
        self.pace: Pace | None = None
        """Of all of the tenant's workers."""
        self._waited = 0
        """Works that waited for a pace that it had before."""
        self._plan: Fence | None = None
        self._tried: Fence | None = None
        """The plan of `_narrow`, or one that needs none, or that could not be carried out, for which there is a `_problem`."""
        self._narrow: NarrowPlacement | None = None
        self._in_use = self._grown = False
        """Whether works go there; whether a model has come there, or come back, of which the launch loop does not know yet."""
        self._changed = False
        self.late = False
        """Whether a placement that is not planned any more is in use still, so that `make` has to be called once more later."""
        self._problem = ""
        self._statistics = NarrowStatistics()

    def __repr__(self) -> str:
        return f"<TenantFence of {self._name}, {self._narrow!r}>"

    @property
    def needed(self) -> bool:
        """Whether there is something to be made or taken away."""
        return bool(self._plan or self._tried)

    def set(self, plan: Fence | None, worker: Worker | None) -> bool:
        """Hold the tenant by this plan, or not at all; whether `make` has to be called for that."""
        before, self._plan = self._plan, plan
        self._set_pace(before, plan)
        if worker:
            worker.pace = self.pace
            if self._has(worker):
                return False
        self._changed = True
        return True

    def reopen_page(self, tenant: str, worker: Worker | None) -> None:
        """A tenant has another page than before, or none any more."""
        plan, narrow = self._plan, self._narrow
        if plan is None or tenant not in plan.neighbours:
            return
        if self.pace:
            self.pace.hold(self._open_pages(plan), plan.pcie)
        if worker:
            worker.pace = self.pace
        if narrow:
            narrow.hold(self._open_pages(plan), narrow.rate)
            if worker and worker.narrow is narrow and not narrow.suspended:
                worker.resume(narrow)

    def set_moved(self) -> None:
        """What works of the models move is known better, or models have changed."""
        if self._narrow:
            self._narrow.set_moved(self._moved())

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

    async def make(self, worker: Worker, add: Add) -> bool:
        """Make the next thing; whether there was one. With the tenant's locks held. Does not raise PartitionError."""
        changed, self._changed = self._changed, False
        if not self._has(worker):
            return changed and await self._replace(worker, self._plan)
        self.late = False
        narrow = self._narrow
        if narrow is None:
            return False
        if await add(worker, narrow):
            self._grown = True
            return True
        self.set_moved()
        if self._grown or not self._in_use:
            await asyncio.to_thread(worker.revoke)
            self._in_use, self._grown = True, False
            worker.resume(narrow)
        return False

    def state(self, worker: Worker) -> FencedTenant | None:
        """What holds the tenant now; None if nothing is planned to."""
        if (plan := self._plan) is None:
            return None
        made = worker.narrow if self._in_use and worker.narrow is self._narrow else None
        refused = [f"{label_of(key)}: {each.why}" for key, each in made.refused.items()] if made else []
        return FencedTenant(
            plan.memory,
            tuple(made.partition.granules) if made else (),
            self._statistics.launches,
            plan.pcie,
            self._waited + (self.pace.waits if self.pace else 0),
            list(plan.notes),
            [self._problem] if self._problem else refused,
            _known(made) if made else [],
        )

    def _set_pace(self, before: Fence | None, plan: Fence | None) -> None:
        """Have the pace of this plan. The same one goes on, with what it has counted and what pays to it."""
        if not (plan and plan.pcie):
            if self.pace:
                self._waited += self.pace.waits
                self.pace.hurry()
            self.pace = None
        elif self.pace is None:
            self.pace = Pace(self._open_pages(plan), plan.pcie)
        elif before and before.neighbours == plan.neighbours:
            self.pace.rate = plan.pcie
        else:
            self.pace.hold(self._open_pages(plan), plan.pcie)

    def _open_pages(self, plan: Fence) -> list[ActivityPage]:
        return [ActivityPage(self._pages[name]) for name in plan.neighbours if name in self._pages]

    def _has(self, worker: Worker) -> bool:
        """Whether the worker has what is planned."""
        wants = bool(self._plan and self._plan.granules)
        return self._plan == self._tried and worker.narrow is self._narrow and wants == (worker.narrow is not None)

    async def _replace(self, worker: Worker, plan: Fence | None) -> bool:
        """Have the placement of this plan in place of another one; whether there is one. One with the same granules stays."""
        before, tried = worker.narrow, self._tried
        if before and before is self._narrow and self._in_use and plan and tried and plan.granules == tried.granules:
            before.hold(self._open_pages(plan), plan.memory)
            worker.resume(before)
            self._tried = plan
            return True
        if before and not await self._take_away(worker, before):
            return False
        self._tried, self._narrow, self._problem = plan, None, ""
        self._in_use = self._grown = self.late = False
        if not (plan and plan.granules):
            return False
        granules = list(plan.granules)
        if not set(granules) <= set(worker.partition.granules):
            self._problem = f"granules {granules}: the tenant has others now, for which there is another plan soon"
            return False
        try:
            worker.narrow = self._narrow = narrow = await asyncio.to_thread(self._carve, plan)
        except PartitionError as error:
            self._problem = f"granules {granules}: {error}"
            log.warning(
                "tenant %s has no narrow placement, so nothing holds its memory bandwidth: %s", self._name, self._problem
            )
            return False
        narrow.hold(self._open_pages(plan), plan.memory)  # Here, as tenants come and go meanwhile.
        text = "tenant %s is held to %.4g GB/s of memory bandwidth while others are at work: on granules %s what draws more"
        log.info(text, self._name, plan.memory / 1e9, granules)
        return True

    async def _take_away(self, worker: Worker, narrow: NarrowPlacement) -> bool:
        """Close a placement once nothing runs there; False, and it stays in use, if that takes longer than `max_pause`."""
        left = narrow.suspend()
        try:
            async with asyncio.timeout(self._max_pause):
                await asyncio.wait({asyncio.wrap_future(left)})
        except TimeoutError:
            why = f"an inference there has been running for {self._max_pause:g} s (server.max_pause)"
            if not self.late:
                log.warning("tenant %s keeps its narrow placement for now: %s", self._name, why)
            worker.resume(narrow)
            self._changed = self.late = True
            return False
        await asyncio.to_thread(worker.revoke)
        worker.narrow = None
        await asyncio.to_thread(narrow.close)
        return True

    def _carve(self, plan: Fence) -> NarrowPlacement:
        """Blocks. Raises PartitionError."""
        partition = self._device.carve(plan.granules)
        try:
            return NarrowPlacement(partition, (), plan.memory, self._statistics)
        except BaseException:
            partition.close()
            raise


def _known(narrow: NarrowPlacement) -> list[FencedModel]:
    """What is known of the models on a placement; a model that is being loaded again is there twice for a moment."""
    return [
        FencedModel(label_of(key), each.moved, round(each.home / 1e6, 4), round(each.narrow / 1e6, 4))
        for key, each in narrow.measured().items()
        if key in narrow.executors
    ]
