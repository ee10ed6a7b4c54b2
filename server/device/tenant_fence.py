"""What holds one tenant to its share of bandwidth: its narrow placement, made as planned, and its pace over PCIe."""

import asyncio
import logging
from collections.abc import Mapping

from partitions import Partition, PartitionError

from ..control.fence import Fence, FencedModel, FencedTenant
from ..link.activity import ActivityPage
from ..link.messages import ModelKey, label_of
from ..workers.narrow import NarrowPlacement, NarrowStatistics
from ..workers.pace import Pace
from ..workers.worker import Worker
from .side import Means, Side


class TenantFence(Side[Fence, NarrowPlacement]):
    """Belongs to the event loop."""

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
        """A work of each of these models (`name/version`) moves so many bytes of memory."""
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
        )

    def _set_pace(self, plan: Fence | None) -> None:
        """Have the pace of this plan. The same one goes on, with what it has counted and what pays to it."""
        if not (plan and plan.pcie):
            if self.pace:
                self._waited += self.pace.waits
                self.pace.hurry()
            self.pace = None
        elif self.pace is None:
            self.pace = Pace(self._open_pages(plan), plan.pcie)
        else:
            self.pace.hold(self._open_pages(plan), plan.pcie)

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
        FencedModel(label_of(key), each.moved, round(each.home / 1e6, 4), round(each.narrow / 1e6, 4))
        for key, each in narrow.measured().items()
        if key in narrow.executors
    ]
