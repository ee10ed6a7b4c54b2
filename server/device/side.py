"""What one tenant has beside its home in one role, wide or narrow: its placement is made as planned, used, and taken away."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from logging import Logger
from typing import ClassVar, Generic, TypeVar

from partitions import Device, Partition, PartitionError

from ..control.fence import Fence
from ..control.stretch import Wide
from ..link.messages import ModelKey, label_of
from ..workers.placement import Placement, SidePlacement
from ..workers.worker import Worker
from .tenant_locks import TenantLocks

Plan = TypeVar("Plan", bound=Fence | Wide)
Made = TypeVar("Made", bound=SidePlacement)
Placed = TypeVar("Placed", bound=Placement)
Add = Callable[[Worker, Placement], Awaitable[bool]]
"""Makes the next model ready on a placement; whether there was one."""


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

    def place(self, granules: Sequence[int], lent: Sequence[int], make: Callable[[Partition], Placed]) -> Placed:
        """A placement on these granules; those that are `lent` are others'. Blocks. Raises PartitionError."""
        partition = self.device.carve(granules, lent)
        try:
            return make(partition)
        except BaseException:
            partition.close()
            raise


class Side(ABC, Generic[Plan, Made]):
    """Belongs to the event loop. The placement closes with the worker that has it, as its attribute `role`.

    `set` says what is to be, and `make` carries it out. A placement that is not planned any more gets no works, and is closed
    once none runs there. If that takes longer than `max_pause` it is tried again later; meanwhile it gets works only if it
    `holds` the tenant back. `called` is what the log calls it, and `without` says what a tenant without one does.
    """

    role: ClassVar[str]
    log: ClassVar[Logger]
    called: ClassVar[str]
    without: ClassVar[str]
    holds: ClassVar[bool] = False
    where: ClassVar[str] = "there"
    """Where an inference runs that runs on it."""

    def __init__(self, name: str, means: Means) -> None:
        self._name = name
        self._means = means
        self._plan: Plan | None = None
        self._tried: Plan | None = None
        """The plan of `_made`, or one that needs none, or that could not be carried out, for which there is a `_problem`."""
        self._made: Made | None = None
        self._in_use = self._grown = False
        """Whether works go there; whether a model has come there, or come back, of which the launch loop does not know yet."""
        self._changed = self._paused = False
        self._problem = ""
        self.late = False
        """Whether a placement that is not planned any more is there still, so that `make` has to be called once more later."""

    @property
    def worker(self) -> Worker | None:
        """The tenant's current one. Any thread."""
        return self._means.workers.get(self._name)

    @property
    def needed(self) -> bool:
        """Whether there is something to be made or taken away."""
        return bool(self._plan or self._tried)

    @property
    def too_late(self) -> str:
        """Why something cannot be done now."""
        return f"an inference {self.where} has been running for {self._means.max_pause:g} s (server.max_pause)"

    def set(self, plan: Plan | None) -> bool:
        """Have the placement of this plan, or none, and use it from now on; whether `make` has to be called for that."""
        self._plan, self._paused = plan, False
        if (worker := self.worker) and self._has(worker) and self._made and self._in_use:
            self._use(worker, self._made)
            self._problem = ""
            return False
        self._changed = True
        return True

    async def pause(self) -> bool:
        """Keep works from the placement until `set`; whether none is in flight there now, as that has not come before."""
        self._paused = True
        return (worker := self.worker) is None or await self._leave(worker)

    async def make(self, worker: Worker, add: Add) -> bool:
        """Make the next thing; whether there was one. With the tenant's locks held. Does not raise PartitionError."""
        changed, self._changed = self._changed, False
        if not self._has(worker):
            return changed and await self._replace(worker)
        self.late = False
        if (made := self._made) is None:
            return False
        if await add(worker, made):
            self._grown = True
            return True
        if self._grown or not self._in_use:
            await asyncio.to_thread(worker.revoke)
            self._in_use, self._grown = True, False
        if not self._paused:
            self._use(worker, made)
        return False

    @property
    def used(self) -> Made | None:
        """The placement, if it is made."""
        worker = self.worker
        return self._made if worker and self._in_use and self._of(worker) is self._made else None

    @property
    def problems(self) -> list[str]:
        """Why it is not made, or which models are not ready there, and why."""
        refused = self.used.refused if self.used else {}
        return [self._problem] if self._problem else [f"{label_of(key)}: {each.why}" for key, each in refused.items()]

    def _of(self, worker: Worker) -> Made | None:
        found: Made | None = getattr(worker, self.role)
        return found

    def _has(self, worker: Worker) -> bool:
        """Whether the worker has what is planned."""
        plan, there = self._plan, self._of(worker)
        return plan == self._tried and there is self._made and bool(plan and plan.granules) == (there is not None)

    async def _replace(self, worker: Worker) -> bool:
        """Have the placement of the plan in place of another one; whether there is one."""
        plan, before = self._plan, self._of(worker)
        if plan and before and before is self._made and self._in_use and self._does_for(plan):
            self._tried, self._problem = plan, ""
            self._use(worker, before)
            return True
        if before and not await self._take_away(worker, before):
            return False
        self._tried, self._made, self._problem = plan, None, ""
        self._in_use = self._grown = self.late = False
        if not (plan and plan.granules):
            return False
        try:
            self._made = await self._open(worker, plan)
        except PartitionError as error:
            self._problem = f"granules {list(plan.granules)}: {error}"
            self.log.warning("tenant %s has no %s, %s: %s", self._name, self.called, self.without, self._problem)
            return False
        setattr(worker, self.role, self._made)
        return True

    async def _take_away(self, worker: Worker, made: Made) -> bool:
        """Close a placement once nothing runs there; False, and it stays, if it is planned again or that takes too long."""
        try:
            async with asyncio.timeout(self._means.max_pause):
                if not await self._leave(worker):
                    return False
        except TimeoutError:
            if not self.late:
                kept = "for now" if self.holds else "for now, and does not use it"
                self.log.warning("tenant %s keeps its %s %s: %s", self._name, self.called, kept, self.too_late)
            self._problem = self.too_late
            self._changed = self.late = True
            if self.holds:
                self._use(worker, made)
            return False
        setattr(worker, self.role, None)
        await asyncio.to_thread(made.close)
        return True

    async def _leave(self, worker: Worker) -> bool:
        """Keep the worker from its placement until nothing is in flight there; False if `resume` comes before that."""
        if made := self._of(worker):
            left = made.suspend()
            await asyncio.wait({asyncio.wrap_future(left)})  # If this is cancelled, others wait for the same future still.
            if left.cancelled():
                return False
            await asyncio.to_thread(worker.revoke)
            return made.suspended and not made.running  # Not if it was resumed meanwhile.
        return True

    def _use(self, worker: Worker, made: Made) -> None:
        self._renew(made)
        worker.resume(made)

    @abstractmethod
    async def _open(self, worker: Worker, plan: Plan) -> Made:
        """The placement of a plan. Raises PartitionError."""

    def _does_for(self, plan: Plan) -> bool:
        """Whether the placement that is in use does for this plan, too."""
        return False

    def _renew(self, made: Made) -> None:
        """Have a placement go by what is known and planned now, before works go there."""
