"""A worker whose model answers in parts: a part a ticket, and an answer that is kept between two of them, or freed."""

import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from engines import Signature, TensorSpec
from server.link.messages import Failure, Ticket
from server.link.slots import SMALLEST
from tests.fakes import FakeEngine
from tests.memory import open_link

from .test_worker import FP32, SIGNATURE, Bench, benched

LOST = "the answer cannot go on: the worker that had begun it has ended; send the request again"
PASSED = 0.0


class Counted:
    """What keeps an answer's state, so that a test sees when that is freed."""


class PartsBench:
    """A bench whose model counts down from its input, a part a number; it raises in place of 13."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.plain = FakeEngine(SIGNATURE, bench.script)
        bench.worker.executors["plain/1#1"] = self.plain.bind(bench.partition)

    def begin(self, slot: int, count: int) -> Ticket:
        ticket = self.bench.ticket(slot, count)
        ticket = ticket._replace(after=ticket.serial)
        self.bench.put(ticket)
        return ticket

    def go_on(self, last: Ticket, **changes: float) -> Ticket:
        ticket = last._replace(serial=last.serial + 1000, after=last.serial)._replace(**changes)
        self.bench.put(ticket)
        return ticket

    def part(self) -> list[float]:
        """The numbers of the next completion; none at the end of an answer."""
        done = self.bench.next()
        assert done.failure is None
        return self.bench.answer(done) if done.outputs else []

    def failure(self) -> Failure:
        failure = self.bench.next().failure
        assert failure
        return failure


def count_down(alive: "weakref.WeakSet[Counted]", inputs: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    state = Counted()
    alive.add(state)
    for number in range(int(np.frombuffer(inputs[0], np.float32)[0]), 0, -1):
        if number == 13:
            raise ValueError("13 is bad luck")
        yield [np.float32(number).tobytes()]


@pytest.fixture
def alive() -> "weakref.WeakSet[Counted]":
    return weakref.WeakSet()


@pytest.fixture
def counting(alive: "weakref.WeakSet[Counted]") -> Iterator[PartsBench]:
    with benched(compute_parts=lambda inputs: count_down(alive, inputs)) as bench:
        bench.engine.signature = replace(bench.engine.signature, outputs=(TensorSpec("y", FP32, (1,)),))
        bench.worker.serve(bench.endpoint)
        gc.disable()  # An answer is to be freed without it.
        yield PartsBench(bench)
        gc.enable()


def test_each_ticket_gives_the_next_part_and_the_last_none(counting: PartsBench, alive: "weakref.WeakSet[Counted]") -> None:
    ticket, parts = counting.begin(0, 3), [counting.part()]
    while parts[-1]:
        ticket = counting.go_on(ticket)
        parts.append(counting.part())
    assert parts == [[3], [2], [1], []]
    assert not alive
    assert counting.bench.link.tickets.unfinished == {}


def test_other_tickets_run_between_two_parts(counting: PartsBench) -> None:
    first, second = counting.begin(0, 9), counting.begin(1, 20)
    assert [counting.part(), counting.part()] == [[9], [20]]
    counting.bench.put(counting.bench.ticket(2, 5, model="plain/1#1"))
    assert counting.part() == [5]
    counting.go_on(second)
    counting.bench.put(counting.bench.ticket(2, 6, model="plain/1#1"))
    counting.go_on(first)
    assert [counting.part() for _ in range(3)] == [[19], [6], [8]]


def test_a_part_that_raises_ends_its_answer(counting: PartsBench, alive: "weakref.WeakSet[Counted]") -> None:
    ticket = counting.begin(0, 14)
    assert counting.part() == [14]
    ticket = counting.go_on(ticket)
    assert counting.failure() == ("raised", "13 is bad luck")
    counting.go_on(ticket)
    assert counting.failure() == ("stopped", LOST)
    counting.bench.worker.halt()  # Until then its thread may hold the error, whose traceback is a cycle.
    gc.collect()
    assert not alive


def test_a_part_that_is_cancelled_ends_its_answer(counting: PartsBench, alive: "weakref.WeakSet[Counted]") -> None:
    ticket = counting.begin(0, 3)
    counting.part()
    gate = counting.bench.script.hold("run")
    ticket = counting.go_on(ticket)
    gate.wait_for_arrival()
    counting.bench.worker.cancel(0, ticket.serial)
    assert counting.failure().kind == "cancelled"
    counting.bench.worker.halt()
    assert not alive
    assert counting.bench.link.tickets.unfinished == {}


def test_a_ticket_whose_deadline_has_passed_frees_the_answer(counting: PartsBench, alive: "weakref.WeakSet[Counted]") -> None:
    ticket = counting.begin(0, 3)
    counting.part()
    assert len(alive) == 1
    counting.go_on(ticket, deadline=PASSED)
    assert counting.failure().kind == "expired"
    counting.bench.worker.halt()
    assert not alive


def test_each_part_may_run_for_as_long_as_an_inference(counting: PartsBench) -> None:
    ticket = counting.begin(0, 3)
    counting.part()
    gate = counting.bench.script.hold("run")
    ticket = counting.go_on(ticket)
    gate.wait_for_arrival()
    assert counting.bench.worker.oldest == ticket.serial  # Another one than before: the time counts from zero.
    counting.bench.worker.overrun(ticket.serial, Failure("overrun", "too long"))
    assert counting.failure() == ("overrun", "too long")


def test_another_worker_on_the_link_goes_on_with_an_answer(counting: PartsBench) -> None:
    ticket = counting.begin(0, 3)
    assert counting.part() == [3]
    bench = counting.bench
    bench.worker.close()
    bench.worker = bench.another(1)
    counting.go_on(ticket)  # Waits in the ring.
    bench.worker.serve(bench.endpoint)
    assert counting.part() == [2]
    assert bench.device.partitions[1].stream.ran == 1
    bench.device.partitions[0] = bench.device.partitions[1]  # The one that the bench checks at its end.


def test_an_answer_that_was_begun_on_another_link_ends_with_an_error(counting: PartsBench) -> None:
    bench, ticket = counting.bench, counting.begin(0, 3)
    counting.part()
    bench.worker.halt()
    descriptors, bench.link = open_link(8, before=bench.link)
    bench.endpoint = bench.endpoint._replace(link=bench.link)
    bench.worker.serve(bench.endpoint)
    counting.go_on(ticket)
    assert counting.failure() == ("stopped", LOST)
    bench.worker.halt()
    descriptors.close()


def test_a_part_that_is_larger_than_its_slot_comes_again_with_the_next_ticket() -> None:
    size = SMALLEST  # Bytes of a part, for which a block with an input in it has no room.
    outputs = (TensorSpec("y", FP32, (size // 4,)),)
    signature = Signature(SIGNATURE.inputs, outputs)
    with benched(compute_parts=lambda inputs: iter([[bytes([number]) * size] for number in range(3)])) as bench:
        bench.engine.signature = replace(signature, in_parts=True)
        bench.worker.serve(bench.endpoint)
        parts = PartsBench(bench)
        ticket = parts.begin(0, 1)
        assert parts.failure() == ("outgrown", str(SMALLEST + 64))
        slot = bench.link.arena.slot(0)
        slot.reserve(SMALLEST + 64)
        for number in range(3):
            ticket = parts.go_on(ticket, capacity=slot.capacity, start=slot.start)
            done = bench.next()
            (extent,) = done.outputs
            assert bytes(slot.view[extent.offset : extent.offset + extent.nbytes]) == bytes([number]) * size
        assert time.monotonic_ns() >= done.ended
        parts.go_on(ticket, capacity=slot.capacity, start=slot.start)
        assert bench.next().outputs == ()
