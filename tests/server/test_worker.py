"""A worker over fakes: tickets in, completions out, and nothing ends the thread."""

import time
from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np
import pytest

from engines import DATATYPES, Signature, TensorSpec
from server.slots import Slot, SlotPool
from server.ticket import Done, Ticket
from server.worker import Worker
from tests.fakes import FakeDevice, FakeEngine, Script

FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (TensorSpec("y", FP32, ("n",)),))
NEVER = float("inf")


class Bench:
    """A worker with one model on a fake partition, and what it reports."""

    def __init__(self) -> None:
        self.script = Script()
        self.engine = FakeEngine(SIGNATURE, self.script)
        self.partition = FakeDevice().carve([0])
        self.slots = SlotPool()
        self.reports: SimpleQueue[Done] = SimpleQueue()
        executors = {"m/1#1": self.engine.bind(self.partition)}
        self.worker = Worker(self.partition, executors, self.slots.__getitem__, self.reports.put)

    def slot(self, *numbers: float) -> Slot:
        """A slot with these numbers as its input."""
        slot = self.slots.acquire()
        data = np.float32(numbers).tobytes()
        (offset,) = slot.place(SIGNATURE, [len(data)])
        slot.view[offset : offset + len(data)] = data
        return slot

    def ticket(self, *numbers: float, model: str = "m/1#1", deadline: float = NEVER) -> Ticket:
        return Ticket(self.slot(*numbers).index, model, ((len(numbers),),), deadline)

    def answer(self, done: Done) -> list[float]:
        (extent,) = done.outputs
        data = self.slots[done.slot].view[extent.offset : extent.offset + extent.nbytes]
        return list(np.frombuffer(data, np.float32))

    def next(self) -> Done:
        return self.reports.get(timeout=30)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.worker.start()
    yield bench
    bench.worker.close()
    assert bench.partition.closed


def test_tickets_are_answered_in_order_from_their_slots(bench: Bench) -> None:
    tickets = [bench.ticket(number, number + 0.5) for number in range(5)]
    for ticket in tickets:
        bench.worker.submit(ticket)
    dones = [bench.next() for _ in tickets]
    assert [done.slot for done in dones] == [ticket.slot for ticket in tickets]
    assert [bench.answer(done) for done in dones] == [[number, number + 0.5] for number in range(5)]
    assert all(done.failure is None and done.began <= done.ended for done in dones)
    assert (bench.worker.statistics().done, bench.worker.statistics().failed) == (5, 0)


def test_the_thread_is_attached_to_the_partition(bench: Bench) -> None:
    bench.worker.submit(bench.ticket(1))
    bench.next()
    assert [thread.name for thread in bench.partition.threads] == [f"worker {bench.partition!r}"]


@pytest.mark.parametrize("point", ["enqueue", "run"])
def test_a_model_that_raises_is_a_failure_and_the_next_ticket_is_served(bench: Bench, point: str) -> None:
    bench.script.fail(point, nth=1)
    bench.worker.submit(bench.ticket(1))
    bench.worker.submit(bench.ticket(2))
    failed, served = bench.next(), bench.next()
    assert failed.failure
    assert failed.failure == ("raised", f"told to fail at {point}")
    assert bench.answer(served) == [2]
    assert bench.worker.statistics().failed == 1


def test_an_error_without_text_is_named_by_its_class(bench: Bench) -> None:
    bench.script.fail("run", error=MemoryError())
    bench.worker.submit(bench.ticket(1))
    assert bench.next().failure == ("raised", "MemoryError")


def test_a_ticket_for_a_model_that_is_gone_is_a_failure(bench: Bench) -> None:
    bench.worker.submit(bench.ticket(1, model="gone/1#1"))
    failure = bench.next().failure
    assert failure
    assert failure.kind == "raised"


def test_a_ticket_whose_deadline_has_passed_is_not_run(bench: Bench) -> None:
    bench.worker.submit(bench.ticket(1, deadline=time.monotonic() - 1))
    failure = bench.next().failure
    assert failure
    assert failure.kind == "expired"
    assert bench.engine.computed == []


def test_a_ticket_cancelled_while_it_runs_ends_early(bench: Bench) -> None:
    gate = bench.script.hold("run")
    ticket = bench.ticket(1)
    bench.worker.submit(ticket)
    gate.wait_for_arrival()
    bench.worker.cancel(ticket.slot)
    failure = bench.next().failure
    assert failure
    assert failure.kind == "cancelled"


def test_a_ticket_cancelled_before_it_begins_is_not_run(bench: Bench) -> None:
    gate = bench.script.hold("run")
    first, second = bench.ticket(1), bench.ticket(2)
    bench.worker.submit(first)
    gate.wait_for_arrival()
    bench.worker.submit(second)
    bench.worker.cancel(second.slot)
    gate.open()
    assert bench.next().failure is None
    failure = bench.next().failure
    assert failure
    assert failure.kind == "cancelled"
    assert len(bench.engine.computed) == 1


def test_a_cancelled_slot_is_as_good_as_new_for_its_next_ticket(bench: Bench) -> None:
    ticket = bench.ticket(1)
    bench.worker.submit(ticket)
    bench.next()
    bench.worker.cancel(ticket.slot)  # Too late: it has ended, and its completion was on its way.
    bench.worker.submit(ticket)
    assert bench.next().failure is None


def test_closing_finishes_what_was_submitted() -> None:
    bench = Bench()
    bench.worker.start()
    gate = bench.script.hold("run")
    for number in range(3):
        bench.worker.submit(bench.ticket(number))
    gate.wait_for_arrival()
    gate.open()
    bench.worker.close()
    assert [bench.answer(bench.next()) for _ in range(3)] == [[0], [1], [2]]
    assert "not running" in repr(bench.worker)
    assert bench.engine.executors[0].closed


def test_a_worker_that_was_never_started_can_be_closed() -> None:
    bench = Bench()
    bench.worker.close()
    assert bench.partition.closed
