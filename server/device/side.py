"""What one tenant has beside its home in one role: its placements, and how models get ready there.

A `Side`, wide or narrow, has one placement: it is made as planned, used, and taken away.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from logging import Logger
from typing import ClassVar, Generic, TypeVar

from engines import EngineError, Executor
from partitions import Device, Partition, PartitionError
from partitions.health import spelled

from ..control.fence import Fence
from ..control.stretch import Wide
from ..link.messages import ModelKey, label_of
from ..workers.placement import Placement, Refusal, SidePlacement, close_all
from ..workers.worker import Worker
from .paged_executor import bound
from .tenant_locks import TenantLocks

Plan = TypeVar("Plan", bound=Fence | Wide)
Made = TypeVar("Made", bound=SidePlacement)
Placed = TypeVar("Placed", bound=Placement)


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


class Role(ABC):
    """Belongs to the event loop. A model that is paged out is on no placement.

    `log` is where a model is reported that cannot be ready, `without` says what the tenant does then, and `over` where that is,
    for want of memory. `late` is set while something has to be tried again later.
    """

    log: ClassVar[Logger]
    without: ClassVar[str]
    over: ClassVar[str] = ""
    late = False

    def __init__(self, name: str, means: Means) -> None:
        self._name = name
        self._means = means
        self._threads: ThreadPoolExecutor | None = means.threads
        """Those that make models ready; None for asyncio's."""

    @property
    def worker(self) -> Worker | None:
        """The tenant's current one. Any thread."""
        return self._means.workers.get(self._name)

    @property
    @abstractmethod
    def placements(self) -> list[Placement]:
        """Those that there are. Any thread."""

    @property
    @abstractmethod
    def needed(self) -> bool:
        """Whether there is something to be made or taken away."""

    @abstractmethod
    async def make(self, worker: Worker) -> bool:
        """Make the next thing; whether there was one. With the tenant's locks held. Does not raise PartitionError."""

    def adds(self, placement: Placement, key: ModelKey) -> dict[str, int]:
        """The memory that a model takes because it is ready there, too. Any thread. On the tenant's first partition it is what
        it would be on the present one if that were ready for a move, and the model's own graphs.
        """
        worker, executor = self.worker, placement.executors.get(key)
        if executor is None:
            return {}
        if (adds := _added(executor)) is not None:
            return adds
        present = (_added(worker.executors.get(key)) if worker else None) or {}
        kept = {kind: nbytes for kind, nbytes in present.items() if kind != "graphs"}
        return {**kept, **{kind: nbytes for kind, nbytes in executor.memory.items() if kind == "graphs"}}

    async def _add(self, worker: Worker, placement: Placement) -> bool:
        """Close what models have left on a placement, and make the next one ready there, or find why it is not; whether there
        was one.
        """
        if gone := [key for key in placement.executors if key not in worker.executors]:
            await asyncio.to_thread(close_all, [placement.executors.pop(key) for key in gone])
        placement.refused = {key: each for key, each in placement.refused.items() if key in worker.executors}
        if (key := self._lacking(worker, placement)) is None:
            return False
        loop = asyncio.get_running_loop()
        try:
            made = await loop.run_in_executor(self._threads, worker.executors[key].alternate, placement.partition)
            if (adds := _added(made)) and (why := self._means.refuse(self._name, key, adds)):
                await loop.run_in_executor(self._threads, made.close)
                self._leave_out(placement, key, Refusal(f"{self.over}{why}", adds))
            else:
                placement.executors[key] = made
        except EngineError as error:
            self._leave_out(placement, key, Refusal(str(error)))
        return True

    def _lacking(self, worker: Worker, placement: Placement) -> ModelKey | None:
        """A model that is to be made ready on a placement."""
        known = {id(worker.executors.get(key)) for key in placement.executors}
        for key, executor in bound(worker.executors).items():
            if id(executor) not in known and self._wants(key, executor, placement.refused.get(key)):
                return key
            known.add(id(executor))  # Others of its keys are for a moment only.
        return None

    def _wants(self, key: ModelKey, executor: Executor, refusal: Refusal | None) -> bool:
        """Whether to make a model ready, which may have been refused before."""
        return refusal is None or bool(refusal.adds and not self._means.refuse(self._name, key, refusal.adds))

    def _leave_out(self, placement: Placement, key: ModelKey, refusal: Refusal) -> None:
        if not (refusal.adds and key in placement.refused):
            where = spelled(placement.partition.granules, self._means.device.address)
            text = "tenant %s: model %s is not ready on %s, %s: %s"
            self.log.warning(text, self._name, label_of(key), where, self.without, refusal.why)
        placement.refused[key] = refusal


class Side(Role, Generic[Plan, Made]):
    """Belongs to the event loop. The placement closes with the worker that has it, as its attribute `role`.

    `set` says what is to be, and `make` carries it out. A placement that is not planned any more gets no works, and is closed
    once none runs there. If that takes longer than `max_pause` it is tried again later; meanwhile it gets works only if it
    `holds` the tenant back. `called` is what the log calls it.
    """

    role: ClassVar[str]
    called: ClassVar[str]
    holds: ClassVar[bool] = False
    where: ClassVar[str] = "there"
    """Where an inference runs that runs on it."""

    def __init__(self, name: str, means: Means) -> None:
        super().__init__(name, means)
        self._plan: Plan | None = None
        self._tried: Plan | None = None
        """The plan of `_made`, or one that needs none, or that could not be carried out, for which there is a `_problem`."""
        self._made: Made | None = None
        self._in_use = self._grown = False
        """Whether works go there; whether a model has come there, or come back, of which the launch loop does not know yet."""
        self._changed = self._paused = False
        self._problem = ""

    @property
    def placements(self) -> list[Placement]:
        made = self._of(worker) if (worker := self.worker) else None
        return [made] if made else []

    @property
    def needed(self) -> bool:
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

    async def make(self, worker: Worker) -> bool:
        changed, self._changed = self._changed, False
        if not self._has(worker):
            return changed and await self._replace(worker)
        self.late = False
        if (made := self._made) is None:
            return False
        if await self._add(worker, made):
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


def _added(executor: Executor | None) -> dict[str, int] | None:
    """What an alternate takes; None for another executor."""
    adds = executor.describe().get("adds") if executor else None
    return dict(adds) if isinstance(adds, dict) else None
