"""The device side of a lane, played by a test, and requests to such a lane."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from engines import DATATYPES, Signature, TensorSpec
from server.link.messages import Done, Extent, Failure, Ticket
from server.link.ring import Link
from server.link.slots import Slot
from server.scheduling.lane import Lane
from server.scheduling.queue_policy import Batching
from server.scheduling.scheduler import Scheduler
from tests.lanes import submit

SLOTS = 12
SHAPES = ((1,),)
FP32 = DATATYPES["FP32"]
ROWS = Signature((TensorSpec("x", FP32, ("b", 2)),), (TensorSpec("y", FP32, ("b",)),), 4)
BATCHING = Batching(ROWS, 4)


class Hand:
    """The device side, driven by the test: takes tickets, answers them when asked to, and records cancellations."""

    def __init__(self, link: Link) -> None:
        self.cancelled: list[tuple[int, int]] = []
        self._link = link
        self._tickets: list[Ticket] = []
        link.tickets.open()

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets that arrived and have no answer yet."""
        while ticket := self._link.tickets.poll():
            self._tickets.append(ticket)
        return self._tickets

    def cancel(self, slot: int, serial: int) -> None:
        self.cancelled.append((slot, serial))

    def put(self, failure: Failure | None = None, outputs: tuple[Extent, ...] = (), ran: int = 1) -> Done:
        """Complete the oldest ticket, which ran for so many nanoseconds."""
        done = Done(self.tickets.pop(0).slot, outputs, failure, 1, 1 + ran)
        self._link.completions.put(done)
        self._link.completions.ring()
        return done

    async def end(self, failure: Failure | None = None, outputs: tuple[Extent, ...] = (), ran: int = 1) -> None:
        """Complete the oldest ticket, and let the lane process its completion."""
        self.put(failure, outputs, ran)
        await settle()


async def settle() -> None:
    """Run the event loop until its callbacks and tasks have nothing left to do."""
    for _ in range(5):
        await asyncio.sleep(0)


@contextmanager
def opened(link: Link, hand: Hand, scheduler: Scheduler) -> Iterator[Lane]:
    lane = Lane("acme", scheduler, link, hand)
    lane.open(asyncio.get_running_loop())
    yield lane
    lane.close(asyncio.get_running_loop())


def ask(lane: Lane, priority: int = 0, timeout: float | None = None) -> tuple[Slot, "asyncio.Future[Done]"]:
    slot = lane.take_slot()
    return slot, submit(lane, slot, "m/1#1", SHAPES, priority, timeout)


def give(
    lane: Lane, rows: int = 1, batching: Batching = BATCHING, model: str = "m", priority: int = 0, timeout: float | None = None
) -> tuple[Slot, "asyncio.Future[Done]"]:
    """Submit a request for a batching model; every element of its input is the number of its slot."""
    slot, shape = lane.take_slot(), (rows, 2)
    (offset,) = slot.lay_out(ROWS, [rows * 8])
    slot.view[offset : offset + rows * 8] = np.full(shape, slot.index, np.float32).tobytes()
    return slot, submit(lane, slot, model, (shape,), priority, timeout, batching)


def given(link: Link, ticket: Ticket) -> list[float]:
    """The first number of each row that a ticket's slot holds."""
    slot = link.arena.slot(ticket.slot)
    (tensor,), _ = slot.inputs(ROWS, ticket.shapes, ticket.capacity)
    at = tensor.address - slot.address
    return list(np.frombuffer(slot.view[at : at + tensor.nbytes], np.float32).reshape(ticket.shapes[0])[:, 0])


def rows_out(count: int) -> tuple[Extent, ...]:
    return (Extent((count,), 256, 4 * count),)
