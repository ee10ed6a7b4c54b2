"""Which of a tenant's queued requests run together as one batch. Pure decisions: no clock, no thread, no I/O.

1. The head of the queue (the smallest priority number, then the oldest) goes first and determines the model.
2. Requests with the same batch key (same model, shapes that differ only in the batch dimension) join it in queue order, also
   past requests with another key, until one does not fit. So requests of one key never overtake each other.
3. A batch is cut at the largest preferred size that it reaches. If it reaches none, all of them form the batch.
4. A batch that could still grow is held back while `in_flight_limit` works are in flight, so that the stream has its next work
   before the current one ends; if the model has a delay, also until the oldest request of the batch has waited that long. While
   works are short, or run on the cores that answer requests, one work in flight is enough to hold it back: there a batch loses
   little by starting late and gains by being larger.
5. A single request never waits on an idle partition, and no batch waits while a request that cannot join it is queued. So no
   request waits for ever, nor for another request's batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engines.signature import Signature

from ..link.messages import Shape, Ticket


@dataclass(frozen=True, slots=True)
class Batching:
    """How requests for one model are joined: up to `most` rows, after at most `delay` seconds while a credit is free.

    `preferred` are the sizes, ascending, at which a batch waits for no more.
    """

    signature: Signature
    most: int
    delay: float = 0.0
    preferred: tuple[int, ...] = ()

    def part(self, ticket: Ticket, now: float) -> "Batchable":
        """What there is to know of a request that begins to wait now, in seconds on any clock."""
        shapes = ticket.shapes
        return Batchable(self, (ticket.model, tuple([shape[1:] for shape in shapes])), shapes[0][0], now + self.delay)


class Batchable(NamedTuple):
    """A request that may be joined with its kin, those of equal `kind`; `due` is when it has waited for them long enough."""

    batching: Batching
    kind: tuple[str, tuple[Shape, ...]]
    rows: int
    due: float


Queued = tuple[int, int, Ticket, Batchable | None]
"""Priority, number in the order of arrival, ticket, and how it may be joined. Sorted, they are a queue."""


class Choice(NamedTuple):
    """What to launch now, as one work; or nothing, and if nothing else happens before, when to ask again.

    `batching` is that of the members if they are several.
    """

    members: Sequence[Queued] = ()
    batching: Batching | None = None
    due: float | None = None


NOTHING = Choice()


def choose(waiting: Sequence[Queued], running: int, enough: int, now: float) -> Choice:
    """Choose from a queue that is not empty, with a credit for one work free, while so many others are `running`.

    Behind `enough` of them no batch is launched that could grow.
    """
    part = waiting[0][3]
    if part is None:
        return Choice(waiting[:1])
    kin, sizes, grows = _kin(waiting, part)
    if cut := _preferred(sizes, part.batching.preferred):
        return _launch(kin[:cut], part.batching)
    if not grows or len(kin) < len(waiting):
        return _launch(kin, part.batching)
    if running >= enough:
        return NOTHING
    due = min([each[3].due for each in kin if each[3]])
    at_once = now >= due or (len(kin) == 1 and not running)
    return _launch(kin, part.batching) if at_once else Choice(due=due)


def _launch(members: Sequence[Queued], batching: Batching) -> Choice:
    return Choice(members, batching if len(members) > 1 else None)


def largest_batch(signature: Signature) -> int:
    """The most rows that one run takes: the largest batch, or fewer where the engine was built for fewer."""
    return min([signature.max_batch, *(spec.limits[0][1] for spec in signature.inputs if spec.limits)])


def _kin(waiting: Sequence[Queued], head: Batchable) -> tuple[list[Queued], list[int], bool]:
    """Those that go with the head, itself included, the rows up to each, and whether there is room for one more."""
    kin: list[Queued] = []
    sizes: list[int] = []
    rows, most = 0, head.batching.most
    for each in waiting:
        part = each[3]
        if part is None or part.kind != head.kind:
            continue
        if kin and rows + part.rows > most:
            return kin, sizes, False
        rows += part.rows
        kin.append(each)
        sizes.append(rows)
    return kin, sizes, rows < most


def _preferred(sizes: Sequence[int], preferred: Sequence[int]) -> int:
    """How many make the largest batch of a preferred size; 0 if none do."""
    return max([place for place, rows in enumerate(sizes, 1) if rows in preferred], default=0) if preferred else 0
