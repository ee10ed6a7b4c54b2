"""Both ends of a link, in one process or two: every ticket and completion arrives once and in order."""

import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from server.errors import BadRequest
from server.link import ring as links
from server.link.arena import MESSAGE
from server.link.blocks import BlockAllocator
from server.link.messages import Done, Extent, Failure, Ticket
from server.link.ring import Descriptors, Link
from tests.contract import in_a_thread
from tests.memory import MEMORY, linked
from tests.server.far_side import KEY, SIGNATURE

PATIENCE = 30
SLOTS = 4
SHAPES = st.lists(st.lists(st.integers(0, 1 << 60), max_size=4).map(tuple), max_size=4).map(tuple)
KINDS = st.sampled_from(["raised", "cancelled", "expired", "lost", "outgrown"])


@contextmanager
def joined(slots: int = SLOTS) -> Iterator[Link]:
    """Both ends in this process, closed afterwards."""
    descriptors = links.create(slots, MEMORY)
    try:
        yield links.join(descriptors)
    finally:
        descriptors.close()


@pytest.fixture
def link() -> Iterator[Link]:
    with linked(SLOTS) as link:
        link.tickets.open()
        yield link


def ticket(slot: int, serial: int = 1, shapes: tuple[tuple[int, ...], ...] = ((1,),)) -> Ticket:
    return Ticket(slot, serial, KEY, shapes, float("inf"), 64)


def put(link: Link, *tickets: Ticket) -> None:
    for each in tickets:
        link.tickets.write(each)
    link.tickets.put(tickets)


def end(link: Link, done: Done) -> None:
    link.completions.put(done)
    link.completions.ring()


def wait(link: Link) -> list[Done]:
    """The completions, once there are any."""
    poller = select.poll()
    poller.register(link.completions.event, select.POLLIN)
    assert poller.poll(PATIENCE * 1000), "no completion came"
    return link.completions.take()


class Interleavings(RuleBasedStateMachine):
    """Compares both rings with plain queues; `woken` is whether the reader was woken since its last `listen`."""

    make = staticmethod(linked)

    def __init__(self) -> None:
        super().__init__()
        self.left = ExitStack()
        self.link = self.left.enter_context(self.make(SLOTS))
        self.link.tickets.open()
        self.tickets: deque[Ticket] = deque()
        self.in_flight: deque[Ticket] = deque()
        self.written: deque[Done] = deque()
        self.dones: deque[Done] = deque()
        self.woken = False
        self.announced = 0
        self.left_over: list[Ticket] = []
        self.serials = count(1)

    def teardown(self) -> None:
        self.left.close()

    def free(self) -> list[int]:
        tickets, dones = (*self.tickets, *self.in_flight, *self.left_over), (*self.written, *self.dones)
        used = {ticket.slot for ticket in tickets} | {done.slot for done in dones}
        return [slot for slot in range(SLOTS) if slot not in used]

    @rule(data=st.data(), shapes=SHAPES, deadline=st.floats(allow_nan=False), after=st.integers(0, (1 << 64) - 1))
    def put(self, data: st.DataObject, shapes: Any, deadline: float, after: int) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.free()), unique=True)) if self.free() else []
        tickets = [Ticket(slot, next(self.serials), KEY, shapes, deadline, 64, 0, after) for slot in slots]
        put(self.link, *tickets)
        self.tickets.extend(tickets)

    @rule()
    def wake(self) -> None:
        self.link.tickets.wake()
        self.woken = True

    @precondition(lambda self: self.woken or len(self.tickets) > self.announced)
    @rule()
    def listen(self) -> None:
        came = self.link.tickets.listen()
        assert came == len(self.tickets) - self.announced
        self.link.tickets.add_unread(came)
        self.announced += came
        self.woken = False

    @rule(look=st.booleans())
    def poll(self, look: bool) -> None:
        if looks := look and not self.announced:
            self.announced, self.woken = len(self.tickets), False
        got = self.link.tickets.poll(look)
        if got is None:
            assert not self.announced, (
                f"a ticket that is there was not found, though it {'looked' if looks else 'was announced'}"
            )
        else:
            self.take(got)
            self.announced -= 1

    @precondition(lambda self: self.in_flight)
    @rule()
    def give_back(self) -> None:
        given = self.in_flight.popleft()
        self.link.tickets.give_back([given])
        self.left_over.append(given)

    @rule()
    def next_reader(self) -> None:
        assert self.link.tickets.take_returned() == self.left_over
        self.in_flight.extend(self.left_over)
        self.left_over = []

    @rule(count=st.integers(0, SLOTS))
    def report_deferred(self, count: int) -> None:
        self.link.completions.report_deferred(count)
        assert self.link.completions.deferred() == count

    def take(self, got: Ticket) -> None:
        assert got == self.tickets.popleft()
        self.in_flight.append(got)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), shapes=SHAPES, failure=st.none() | st.builds(Failure, KINDS, st.text(max_size=99)))
    def end(self, data: st.DataObject, shapes: Any, failure: Failure | None) -> None:
        ended = data.draw(st.sampled_from(list(self.in_flight)))
        self.in_flight.remove(ended)
        outputs = () if failure else tuple([Extent(shape, place * 64, place) for place, shape in enumerate(shapes)])
        done = Done(ended.slot, outputs, failure, ended.serial, ended.serial + 1)
        self.link.completions.put(done)
        self.written.append(done)

    @rule()
    def ring(self) -> None:
        self.link.completions.ring()
        self.dones.extend(self.written)
        self.written.clear()

    @rule()
    def take_completions(self) -> None:
        assert self.link.completions.take() == list(self.dones)
        self.dones.clear()


class InterleavingsOfThreads(Interleavings):
    """The same for a link within one process, which passes objects and no bytes."""

    make = staticmethod(joined)


TestInterleavings = Interleavings.TestCase
TestInterleavingsOfThreads = InterleavingsOfThreads.TestCase


def test_within_a_process_messages_of_any_length_arrive_as_the_same_objects() -> None:
    said = ticket(1, shapes=((1 << 40,),) * 2000)
    with joined(SLOTS) as link:
        link.tickets.open()
        put(link, said)
        assert link.tickets.poll() is said
        end(link, done := Done(1, (Extent((1,), 0, 4),) * 5000, None, 3, 4))
        (got,) = link.completions.take()
    assert got is done


def test_unread_tickets_are_kept_for_the_next_reader(link: Link) -> None:
    put(link, ticket(0), ticket(1))
    link.tickets.add_unread(link.tickets.listen())
    assert link.tickets.poll() == ticket(0)
    link.tickets.wake()
    put(link, ticket(2))
    link.tickets.open()
    assert [link.tickets.poll(), link.tickets.poll(False), link.tickets.poll()] == [ticket(1), None, ticket(2)]
    assert link.tickets.poll() is None


@pytest.mark.parametrize("ends", [linked, joined], ids=["two processes", "one"])
def test_a_ticket_that_is_put_back_is_the_next_one_again(ends: Any) -> None:
    with ends(SLOTS) as link:
        link.tickets.open()
        first, second = ticket(2, 1), ticket(0, 2)
        put(link, first, second)
        link.tickets.add_unread(link.tickets.listen())
        for _ in range(3):
            assert link.tickets.poll() == first
            link.tickets.put_back()
        assert [link.tickets.poll() for _ in range(3)] == [first, second, None]


@pytest.mark.parametrize("ends", [linked, joined], ids=["two processes", "one"])
def test_a_reader_may_listen_for_so_long_only(ends: Any) -> None:
    with ends(SLOTS) as link:
        link.tickets.open()
        assert link.tickets.listen(0.001) == 0
        put(link, ticket(0), ticket(1))
        assert link.tickets.listen(PATIENCE) == 2
        link.tickets.wake()
        assert link.tickets.listen(PATIENCE) == 0
        assert link.tickets.listen(0.001) == 0


def test_more_deferred_tickets_wake_the_other_side_and_fewer_do_not(link: Link) -> None:
    poller = select.poll()
    poller.register(link.completions.event, select.POLLIN)
    link.completions.report_deferred(2)
    assert poller.poll(PATIENCE * 1000)
    assert link.completions.take() == []
    link.completions.report_deferred(1)
    assert not poller.poll(0)
    end(link, Done(0, (), None, 1, 2))
    link.completions.report_deferred(2)
    assert [done.slot for done in link.completions.take()] == [0]


def test_a_signal_does_not_interrupt_a_listening_reader(link: Link) -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        for turn in range(50):
            thread, came = in_a_thread(link.tickets.listen)
            for _ in range(20):
                assert thread.ident
                signal.pthread_kill(thread.ident, signal.SIGUSR1)
                os.sched_yield()
            put(link, ticket(0, turn))
            link.tickets.add_unread(came.result(PATIENCE))
            assert link.tickets.poll(False) == ticket(0, turn)
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_ticket_longer_than_its_page_is_refused_and_others_arrive(link: Link) -> None:
    put(link, ticket(0))
    with pytest.raises(BadRequest, match=r"^inputs: 2000 tensors have shapes too long to send, \d+ bytes$"):
        link.tickets.write(ticket(1, shapes=((1 << 40,),) * 2000))
    put(link, ticket(2))
    assert [link.tickets.poll() for _ in range(3)] == [ticket(0), ticket(2), None]


def test_outputs_too_many_for_a_completion_are_reported_as_a_failure(link: Link) -> None:
    end(link, Done(1, (Extent((1,), 0, 4),) * 5000, None, 3, 4))
    (done,) = link.completions.take()
    assert (done.slot, done.outputs, done.began, done.ended) == (1, (), 3, 4)
    assert done.failure
    assert done.failure.kind == "raised"
    assert done.failure.text.startswith("5000 outputs have shapes too long to send, ")


@given(st.text(min_size=1, max_size=9), KINDS)
def test_a_long_failure_text_is_cut_and_keeps_its_kind(text: str, kind: Any) -> None:
    with linked(1) as link:
        end(link, Done(0, (), Failure(kind, text * MESSAGE), 1, 2))
        (done,) = link.completions.take()
    assert done.failure
    assert done.failure.kind == kind
    assert (text * MESSAGE).startswith(done.failure.text)
    assert len(done.failure.text) >= 1000


@pytest.mark.parametrize("letter", ["a", "é", "字", "\U0001f600", "\ud800"])
def test_a_long_failure_text_of_any_characters_fits(link: Link, letter: str) -> None:
    end(link, Done(0, (), Failure("lost", letter * MESSAGE), 1, 2))
    (done,) = link.completions.take()
    assert done.failure
    assert done.failure.kind == "lost"
    assert set(done.failure.text) == {"?" if letter == "\ud800" else letter}  # Half of a pair has no UTF-8.


@pytest.fixture
def far() -> Iterator[tuple[Link, "subprocess.Popen[bytes]"]]:
    """A link whose device side is another process."""
    descriptors = links.create(SLOTS, MEMORY)
    shared = descriptors[:4]
    command = [sys.executable, "-m", "tests.server.far_side", *map(str, descriptors)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=shared) as process:
        yield links.attach(descriptors), process
        assert process.stdin
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
    descriptors.close()


def test_tensors_and_answers_cross_between_two_processes(far: tuple[Link, Any]) -> None:
    link, _ = far
    blocks = BlockAllocator(MEMORY)
    for turn in range(3 * SLOTS):
        slot = link.arena.slot(turn % SLOTS)
        slot.blocks = blocks
        data = bytes(range(turn, turn + 8))
        assert slot.lay_out(SIGNATURE, [8]) == [0]
        slot.view[:8] = data
        put(link, Ticket(slot.index, turn, KEY, ((2,),), float("inf"), slot.capacity, slot.start))
        (done,) = wait(link)
        (extent,) = done.outputs
        assert (done.slot, done.failure, extent.shape) == (slot.index, None, (2,))
        assert bytes(slot.view[extent.offset : extent.offset + 8]) == data[::-1]


def test_descriptors_can_be_closed() -> None:
    descriptors = links.create(1, MEMORY)
    Descriptors(*descriptors).close()
    for descriptor in descriptors[:4]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
