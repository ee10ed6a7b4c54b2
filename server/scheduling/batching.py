"""Which of a tenant's queued requests run together as one batch. Pure decisions: no clock, no thread, no I/O.

1. The head of the queue (the smallest priority number, then the oldest) goes first and determines the model.
2. Requests with the same batch key (same model, shapes that differ only in the batch dimension) join it in queue order, also
   past requests with another key, until one does not fit. So requests of one key never overtake each other.
3. A batch ends at the largest preferred size that it reaches. If it reaches none, all of them form the batch.
4. A batch that could still grow is held back while `in_flight_limit` works are in flight, so that the stream has its next work
   before the current one ends; if the model has a delay, also until the oldest request of the batch has waited that long. While
   works are short, or run on the cores that answer requests, one work in flight is enough to hold it back: there a batch loses
   little by starting late and gains by being larger.
5. A single request never waits on an idle partition, and no batch waits while a request that cannot join it is queued. So no
   request waits for ever, nor for another request's batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engines.signature import Signature

from ..link.messages import Shape, Ticket
from .queue_policy import Batching


class Batchable(NamedTuple):
    """A request that can run in a batch with others of the same `key`; `due` is when it has waited long enough for them."""

    batching: Batching
    key: tuple[str, tuple[Shape, ...]]
    rows: int
    due: float


def batchable(batching: Batching, ticket: Ticket, now: float) -> Batchable:
    """A request that is queued now; `now` is in seconds on any clock."""
    shapes = ticket.shapes
    return Batchable(batching, (ticket.model, tuple([shape[1:] for shape in shapes])), shapes[0][0], now + batching.delay)


Queued = tuple[int, int, Ticket, Batchable | None]
"""Priority, order of arrival, ticket, and how it can be batched (None: it runs alone). Sorted, they are the queue."""


class Choice(NamedTuple):
    """What to launch now as one work. If `members` is empty nothing is launched, and `due` is when to ask again at the latest.

    `batching` is set if there are several members.
    """

    members: Sequence[Queued] = ()
    batching: Batching | None = None
    due: float | None = None


NOTHING = Choice()


def choose(waiting: Sequence[Queued], running: int, enough: int, now: float) -> Choice:
    """Choose from a queue that is not empty while one more work may start and `running` others are in flight.

    While `enough` are in flight, a batch that could grow is not launched.
    """
    head = waiting[0][3]
    if head is None:
        return Choice(waiting[:1])
    members, sizes, grows = _same_key(waiting, head)
    if reached := _preferred(sizes, head.batching.preferred):
        return _launch(members[:reached], head.batching)
    if not grows or len(members) < len(waiting):
        return _launch(members, head.batching)
    if running >= enough:
        return NOTHING
    due = min([each[3].due for each in members if each[3]])
    at_once = now >= due or (len(members) == 1 and not running)
    return _launch(members, head.batching) if at_once else Choice(due=due)


def _launch(members: Sequence[Queued], batching: Batching) -> Choice:
    return Choice(members, batching if len(members) > 1 else None)


def largest_batch(signature: Signature) -> int:
    """The most rows of one run: the model's largest batch, or fewer if the engine was built for fewer."""
    return min([signature.max_batch, *(spec.limits[0][1] for spec in signature.inputs if spec.limits)])


def _same_key(waiting: Sequence[Queued], head: Batchable) -> tuple[list[Queued], list[int], bool]:
    """The requests that run with the head, itself included; the total rows up to each; and whether one more would fit."""
    members: list[Queued] = []
    sizes: list[int] = []
    rows, most = 0, head.batching.most
    for each in waiting:
        batchable = each[3]
        if batchable is None or batchable.key != head.key:
            continue
        if members and rows + batchable.rows > most:
            return members, sizes, False
        rows += batchable.rows
        members.append(each)
        sizes.append(rows)
    return members, sizes, rows < most


def _preferred(sizes: Sequence[int], preferred: Sequence[int]) -> int:
    """How many members make the largest batch of a preferred size; 0 if none do."""
    return max([count for count, rows in enumerate(sizes, 1) if rows in preferred], default=0) if preferred else 0
