"""What engines that run other engines share: their works run in order on the thread that waits, and their executors are bound,
moved and closed together.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from ctypes import memmove
from threading import RLock
from typing import Any

from partitions import Partition

from .base import Executor, Room, Tensor, Work
from .errors import Cancelled
from .memory import added, shared_by
from .settings import RuntimeSettings, overridden
from .signature import Shape, align


class WorkInTurn:
    """One inference that runs when its turn comes, on a thread that waits for it or for a later one; see `engines.base.Work`.

    A subclass implements `compute`.
    """

    def __init__(self, turns: "Turns") -> None:
        self.ended = False
        self.cancelled = False
        self._turns = turns
        self._current: Work | None = None
        self._outputs: tuple[Tensor, ...] = ()
        self._error: Exception | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'failed' if self._error else 'done' if self.ended else 'waiting'}>"

    def wait(self) -> tuple[Tensor, ...]:
        self._turns.run_until(self)
        if self._error:
            raise self._error
        return self._outputs

    def cancel(self) -> None:
        self.cancelled = True
        if current := self._current:
            current.cancel()

    def run(self) -> None:
        """Run it, once, and keep the outputs or the error. Called by `Turns`."""
        try:
            self._outputs = self.compute()
        except Exception as error:
            self._error = error
        self._current = None
        self.ended = True

    def compute(self) -> tuple[Tensor, ...]:
        """The outputs; raises what `wait` is to raise. Called once."""
        raise NotImplementedError

    def run_model(self, executor: Executor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run one model and return its outputs. Raises Cancelled if this work is cancelled meanwhile."""
        self._current = executor.enqueue(inputs)
        if self.cancelled:
            self._current.cancel()
        outputs = self._current.wait()
        if self.cancelled:
            raise Cancelled("cancelled between two models")
        return outputs


class Turns:
    """The works of one executor, in order."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._pending: deque[WorkInTurn] = deque()

    def add(self, work: WorkInTurn) -> None:
        """Enqueue a work."""
        self._pending.append(work)

    def run_until(self, work: WorkInTurn) -> None:
        """Run what was enqueued, in order, up to this work. Blocks."""
        with self._lock:
            while not work.ended:
                self._pending.popleft().run()


class BoundTogether:
    """The executors of several engines on one partition, as one: what `engines.base.Executor` says beside `enqueue`."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self.executors = tuple(executors)
        self.closed = False
        self.turns = Turns()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {list(self.executors)}{', closed' if self.closed else ''}>"

    @contextmanager
    def overriding(self, **changes: Any) -> Iterator[None]:
        overridden(RuntimeSettings(), changes)
        each: list[AbstractContextManager[None]] = [executor.overriding(**changes) for executor in self.executors]
        with ExitStack() as after:
            for one in each:
                after.enter_context(one)
            yield

    def stop_padding(self) -> None:
        """As `engines.verification.rows.stop_padding`, for every executor."""
        for executor in self.executors:
            stop: Callable[[], None] | None = getattr(executor, "stop_padding", None)
            if stop is not None:
                stop()

    def preparing(self, shapes: Sequence[Shape]) -> None:
        """None: the shapes between the models are not known beforehand."""

    @property
    def memory(self) -> dict[str, int]:
        """That of every executor."""
        return added(executor.memory for executor in self.executors)

    @property
    def shared_memory(self) -> Mapping[Hashable, Mapping[str, int]]:
        """That of every executor, each thing once."""
        return shared_by(self.executors)

    def describe_steps(self) -> Mapping[str, object]:
        """What each executor says of itself, and what all together add if they are alternates."""
        steps = [dict(executor.describe()) for executor in self.executors]
        return {"steps": steps, **sum_of_adds(steps)}

    def trim(self, after: float, idle: bool) -> None:
        """Trim every executor."""
        for executor in self.executors:
            if (trim := getattr(executor, "trim", None)) is not None:
                trim(after, idle)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with ExitStack() as closing:
                for executor in self.executors:
                    closing.callback(executor.close)


Bind = Callable[[Partition], Executor]


@contextmanager
def bound(binds: Iterable[Bind], partition: Partition) -> Iterator[list[Executor]]:
    """The executors that these calls bind to the partition, all or none: they are closed if one or the block raises. Blocks."""
    with ExitStack() as failed:
        executors: list[Executor] = []
        for bind in binds:
            executors.append(bind(partition))
            failed.callback(executors[-1].close)
        yield executors
        failed.pop_all()


def sum_of_adds(descriptions: Iterable[Mapping[str, object]]) -> Mapping[str, object]:
    """`adds` of several executors that serve as one; {} if none of them is an alternate."""
    found = [adds for each in descriptions if isinstance(adds := each.get("adds"), dict)]
    return {"adds": added(found)} if found else {}


def placed(tensors: Sequence[Tensor], known: Sequence[Shape | None], room: Room) -> Iterator[Tensor]:
    """Copies of those of known size into the room, as far as they fit; the others as they are. None of those not asked for."""
    end = 0
    for index, (tensor, shape) in enumerate(zip(tensors, known, strict=True)):
        if room.unasked >> index & 1:
            yield room.left_out
        elif shape is not None and end + tensor.nbytes <= room.nbytes:
            memmove(room.address + end, tensor.address, tensor.nbytes)
            yield Tensor(tensor.shape, room.address + end, tensor.nbytes)
            end = align(end + tensor.nbytes)
        else:
            yield tensor
