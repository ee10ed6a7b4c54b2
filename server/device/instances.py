"""Several executors of one engine on one partition, used in round robin as if they were one.

Works on a partition's stream still run one after another. The gain is that each executor has its own shapes, graphs and memory,
so one can prepare itself for new shapes while works of the others are in flight. The launch loop launches the graphs of the
first: it has those of all shapes that are ready, and taking turns would gain nothing there.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from threading import Lock
from typing import Any

from engines import Engine, Executor, Recipe, Room, Tensor, Work
from engines.base import NO_ROOM
from engines.in_turn import sum_of_adds
from engines.memory import added, shared_by
from engines.signature import Shape
from partitions import Partition


class RoundRobinExecutor:
    """Passes each inference to the next of several executors of one engine; see `engines.base.Executor`."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self.engine = executors[0].engine
        self._executors = tuple(executors)
        self._turns = cycle(self._executors)

    def __repr__(self) -> str:
        return f"<RoundRobinExecutor {list(self._executors)}>"

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> Work:
        return next(self._turns).enqueue(inputs, room)

    def proceed(self, part: Work, room: Room = NO_ROOM) -> Work:
        """The next part of an answer: any of the executors may go on with it."""
        executor: Any = next(self._turns)
        work: Work = executor.proceed(part, room)
        return work

    def preparing(self, shapes: Sequence[Shape]) -> "Future[None] | None":
        """None if all executors are ready: which one is next is unknown while others are being enqueued."""
        asked = [getattr(executor, "preparing", None) for executor in self._executors]
        pending = [future for ask in asked if ask is not None and (future := ask(shapes)) is not None]
        return _all(pending) if pending else None

    def recipe(self, shapes: Sequence[Shape], revoke: Callable[[], None]) -> Recipe | None:
        """As `engines.base.Launchable`: that of the first executor, None if it has none."""
        first: Any = self._executors[0]
        found: Recipe | None = first.recipe(shapes, revoke) if hasattr(first, "recipe") else None
        return found

    def rebind(self, partition: Partition) -> "RoundRobinExecutor":
        """All executors or none."""
        return RoundRobinExecutor(_all_or_none([partial(executor.rebind, partition) for executor in self._executors]))

    def alternate(self, partition: Partition) -> "RoundRobinExecutor":
        """Of all executors or none."""
        return RoundRobinExecutor(_all_or_none([partial(executor.alternate, partition) for executor in self._executors]))

    @contextmanager
    def overriding(self, **changes: Any) -> Iterator[None]:
        """For all executors."""
        with ExitStack() as after:
            for executor in self._executors:
                after.enter_context(executor.overriding(**changes))
            yield

    def describe(self) -> Mapping[str, object]:
        """The description of the first, with the number of executors and the sums of all counts and of what they add."""
        each = [executor.describe() for executor in self._executors]
        counts: dict[str, int] = {}
        for said in each:
            found = said.get("counts")
            for name, count in found.items() if isinstance(found, dict) else ():
                counts[name] = counts.get(name, 0) + count
        return {**each[0], "instances": len(each), **({"counts": counts} if counts else {}), **sum_of_adds(each)}

    @property
    def memory(self) -> Mapping[str, int]:
        """The sum over all executors."""
        return added(executor.memory for executor in self._executors)

    @property
    def shared_memory(self) -> Mapping[Hashable, Mapping[str, int]]:
        """That of each, each thing once."""
        return shared_by(self._executors)

    def trim(self, after: float, idle: bool) -> None:
        """Trim each."""
        for executor in self._executors:
            if (trim := getattr(executor, "trim", None)) is not None:
                trim(after, idle)

    def close(self) -> None:
        """Close each, even if others fail; raises the first error."""
        errors: list[Exception] = []
        for executor in self._executors:
            try:
                executor.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def bind_instances(engine: Engine, partition: Partition, count: int) -> Executor:
    """Bind `count` executors, all or none, as one; a single one is returned itself. Blocks. Raises ModelRefused."""
    if count == 1:
        return engine.bind(partition)
    return RoundRobinExecutor(_all_or_none([partial(engine.bind, partition)] * count))


def _all_or_none(binders: Sequence[Callable[[], Executor]]) -> list[Executor]:
    bound: list[Executor] = []
    try:
        for bind in binders:
            bound.append(bind())
    except BaseException:
        if bound:
            RoundRobinExecutor(bound).close()
        raise
    return bound


def _all(pending: "Sequence[Future[None]]") -> "Future[None]":
    """A future that completes with the last of these, with the first error if there is one."""
    whole: Future[None] = Future()
    left, lock = set(map(id, pending)), Lock()

    def ended(one: "Future[None]") -> None:
        with lock:
            left.discard(id(one))
            last = not left
        if last:
            error = next((error for each in pending if (error := each.exception())), None)
            whole.set_exception(error) if error else whole.set_result(None)

    for future in pending:
        future.add_done_callback(ended)
    return whole
