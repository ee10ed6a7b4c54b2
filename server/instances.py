"""Several executors of one engine on one partition, as if they were one: each inference goes to the next of them.

Works of a partition's stream run one after another all the same. What is gained is that each executor keeps shapes, graphs
and memory of its own, so that one may be prepared anew while works of the others are in flight.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle

from engines import Engine, Executor, Room, Signature, Tensor, Work
from engines.base import NO_ROOM
from partitions import Partition


class Instances:
    """An engine of which `count` executors are bound at a time; see `engines.base.Engine`."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self._count = count

    def __repr__(self) -> str:
        return f"<Instances {self._count} of {self._engine!r}>"

    @property
    def signature(self) -> Signature:
        return self._engine.signature

    @property
    def platform(self) -> str:
        return self._engine.platform

    def bind(self, partition: Partition) -> "InTurn":
        """All or none."""
        bound: list[Executor] = []
        try:
            for _ in range(self._count):
                bound.append(self._engine.bind(partition))
        except BaseException:
            _close(bound)
            raise
        return InTurn(self, bound)

    def close(self) -> None:
        self._engine.close()


class InTurn:
    """Executors that take turns; see `engines.base.Executor`."""

    def __init__(self, engine: Instances, executors: Sequence[Executor]) -> None:
        self.engine = engine
        self._executors = tuple(executors)
        self._turns = cycle(self._executors)

    def __repr__(self) -> str:
        return f"<InTurn {list(self._executors)}>"

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> Work:
        return next(self._turns).enqueue(inputs, room)

    def describe(self) -> Mapping[str, object]:
        """As the first says, with how many there are, and the counts of all."""
        each = [executor.describe() for executor in self._executors]
        counts: dict[str, int] = {}
        for said in each:
            found = said.get("counts")
            for name, count in found.items() if isinstance(found, dict) else ():
                counts[name] = counts.get(name, 0) + count
        return {**each[0], "instances": len(each), **({"counts": counts} if counts else {})}

    def close(self) -> None:
        _close(self._executors)


def _close(executors: Sequence[Executor]) -> None:
    """Each, whatever becomes of the others; raises the first error."""
    errors: list[Exception] = []
    for executor in executors:
        try:
            executor.close()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
