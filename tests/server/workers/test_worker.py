"""Worker over fakes: tickets in, completions out, no failure ends its threads, and another worker continues where it halted."""

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, cycle
from typing import TypeVar

import numpy as np
import pytest

from engines import DATATYPES, ExecutionFailed, Signature, TensorSpec
from partitions import DeviceLost
from server.accounts.meter import Meter
from server.link.messages import Done, Malformed, Ticket
from server.link.ring import Link
from server.link.slots import SMALLEST
from server.workers.deferred import MAX_RESUMED
from server.workers.gil_priority import GilPriorities
from server.workers.placement import Placement
from server.workers.session import Endpoint
from server.workers.ticket_runner import BUNDLE
from server.workers.worker import Worker
from tests.contract import in_a_thread
from tests.fakes import ComputeParts, FakeDevice, FakeEngine, FakePartition, Gate, Script
from tests.launchable import LaunchableEngine, LaunchableExecutor, needs_a_compiler
from tests.memory import open_link

FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (TensorSpec("y", FP32, ("n",)),))
NEVER = float("inf")
SLOTS = 8
PATIENCE = 30


class Interrupted(Script):
    """A script that calls the functions in `meanwhile`, each once, when a work is enqueued."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], None]] = []

    def reach(self, point: str, given_up: Callable[[], bool] = lambda: False) -> None:
        if point == "enqueue" and self.meanwhile:
            self.meanwhile.pop()()
        super().reach(point, given_up)


class Bench:
    """A worker with one model on a fake partition, its endpoint, and its completions."""

    def __init__(
        self,
        link: Link,
        priorities: GilPriorities | None = None,
        compute_parts: ComputeParts | None = None,
        launchable: bool = False,
    ) -> None:
        self.script = Interrupted()
        self.device = FakeDevice()
        kind = LaunchableEngine if launchable else FakeEngine
        self.engine = kind(SIGNATURE, self.script, compute_parts=compute_parts)
        self.link = link
        self.endpoint = Endpoint(link, self.device.pin(0, 0))
        self.lost: list[DeviceLost] = []
        self.errors: list[Exception] = []
        self._failed = threading.Event()
        self.naps: list[float] = []
        self.priorities = priorities or GilPriorities(self.naps.append)
        self.meter = Meter()
        self.worker = self.another(0)
        self._serials = count(1)
        self._reported: list[Done] = []
        self._learnt = 0

    def another(self, granule: int) -> Worker:
        """One more worker, on a partition of its own."""
        partition = self.device.carve([granule])
        home = Placement(partition, {"m/1#1": self.engine.bind(partition)})
        return Worker(home, self.lost.append, self.priorities, self._on_error, meter=self.meter)

    def _on_error(self, error: Exception) -> None:
        self.errors.append(error)
        self._failed.set()

    def wait_for_error(self) -> None:
        """Block until a thread of a worker has failed."""
        assert self._failed.wait(PATIENCE), "no thread failed"

    def wait_until_held(self) -> None:
        """Block until the launch loop has a ticket wait."""
        assert self.worker.runner
        loop, until = self.worker.runner.session.loop, time.monotonic() + PATIENCE
        assert loop
        while not loop.holds:
            assert time.monotonic() < until, "no ticket waits"
            time.sleep(0)

    @property
    def partition(self) -> FakePartition:
        return self.device.partitions[0]

    def ticket(self, slot: int, *numbers: float, model: str = "m/1#1", deadline: float = NEVER) -> Ticket:
        """A ticket, with these numbers as the input in its slot."""
        memory, data = self.link.arena.slot(slot), np.array(numbers, np.float32).tobytes()
        memory.free_block()
        (offset,) = memory.lay_out(SIGNATURE, [len(data)])
        memory.view[offset : offset + len(data)] = data
        return Ticket(slot, next(self._serials), model, ((len(numbers),),), deadline, memory.capacity, memory.start)

    def put(self, *tickets: Ticket) -> None:
        for ticket in tickets:
            self.link.tickets.write(ticket)
        self.link.tickets.put(tickets)

    def begin(self, *tickets: Ticket, count: int = 1) -> Gate:
        """Put these, of which those that run do not end before the gate is opened; `count` have been begun."""
        gate = self.script.hold("run")
        self.put(*tickets)
        gate.wait_for_arrival(count)
        return gate

    def rush(self) -> None:
        """Run one inference for each slot, without pauses."""
        self.put(*[self.ticket(slot, slot) for slot in range(SLOTS)])
        assert [self.answer(self.next()) for _ in range(SLOTS)] == [[slot] for slot in range(SLOTS)]

    def tarry(self, point: str, given_up: Callable[[], bool] = lambda: False) -> None:
        """In place of the script's `reach`: a run takes a while, but not long."""
        end = time.monotonic_ns() + 2 * BUNDLE
        while point == "run" and time.monotonic_ns() < end:
            pass

    def answer(self, done: Done) -> list[float]:
        assert done.failure is None
        (extent,) = done.outputs
        data = self.link.arena.slot(done.slot).view[extent.offset : extent.offset + extent.nbytes]
        return list(np.frombuffer(data, np.float32))

    def next(self) -> Done:
        poller = select.poll()
        poller.register(self.link.completions.event, select.POLLIN)
        while not self._reported:
            assert poller.poll(PATIENCE * 1000), "nothing was reported"
            self._reported = self.link.completions.take()
        return self._reported.pop(0)

    def wait_for_enqueued(self, wanted: int) -> None:
        """Block until so many works were enqueued or launched since the bench began, or learnt."""
        until = time.monotonic() + PATIENCE
        while self.enqueued() < wanted:
            assert time.monotonic() < until, f"{self.enqueued()} of {wanted} were enqueued"
            time.sleep(0)

    def enqueued(self) -> int:
        launched = sum(each.launched for each in self.engine.executors if isinstance(each, LaunchableExecutor))
        return self.script.reached["enqueue"] + launched - self._learnt

    def kind(self) -> str:
        """The kind of the next completion's failure."""
        failure = self.next().failure
        assert failure
        return failure.kind

    def teach(self) -> None:
        """Have the launch loop of a worker that serves learn tickets of one number; forget what that counted."""
        for _ in range(2):
            self.put(self.ticket(0, 1))
            self.next()
        assert self.engine.executors[0].launched == 1
        self._learnt = 1
        self.script.reached.clear()
        self.engine.computed.clear()
        self.partition.stream.ran = 0


B = TypeVar("B", bound=Bench)


def wait_until_stopping(worker: Worker) -> None:
    """Block until a worker, which has a work in flight, was asked to stop."""
    assert worker.runner
    roles, until = worker.runner.session.roles, time.monotonic() + PATIENCE
    while not roles.stopped:
        assert time.monotonic() < until, "the worker was not asked to stop"
        time.sleep(0)


@contextmanager
def benched(
    priorities: GilPriorities | None = None,
    compute_parts: ComputeParts | None = None,
    launchable: bool = False,
    kind: type[B] = Bench,  # type: ignore[assignment]
    slots: int = SLOTS,
) -> Iterator[B]:
    """A bench, of this class, whose worker does not serve yet."""
    descriptors, link = open_link(slots)
    bench = kind(link, priorities, compute_parts, launchable)
    yield bench
    bench.worker.close()
    assert bench.partition.closed
    descriptors.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with benched() as bench:
        bench.worker.serve(bench.endpoint)
        yield bench


@pytest.fixture(params=["python", pytest.param("loop", marks=needs_a_compiler)])
def either(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A bench whose works are enqueued by the worker, and one whose works are launched by the launch loop."""
    with benched(launchable=request.param == "loop") as bench:
        bench.worker.serve(bench.endpoint)
        if request.param == "loop":
            bench.teach()
        yield bench


@pytest.mark.parametrize(("hosted", "threads"), [(False, 2), (True, 1)])
def test_threads_are_attached_to_the_partition_and_on_host_cores_there_is_only_one(hosted: bool, threads: int) -> None:
    with benched() as bench:
        bench.device.on_host_cores = hosted
        bench.worker.serve(bench.endpoint)
        bench.put(bench.ticket(0, 1))
        bench.next()
        bench.worker.halt()
        assert len(bench.partition.threads) == threads
        assert bench.link.completions.on_host_cores() == hosted
        assert all(thread.name.startswith(f"worker {bench.partition!r}") for thread in bench.partition.threads)


@pytest.mark.parametrize("served", [False, True])
def test_threads_that_were_started_early_serve_when_they_are_to_and_end_with_the_worker(served: bool) -> None:
    with benched() as bench:
        bench.worker.warm_up()
        early = [thread for thread in threading.enumerate() if thread.name.startswith(f"worker {bench.partition!r}")]
        assert len(early) == 2
        if served:
            bench.worker.serve(bench.endpoint)
            bench.put(bench.ticket(0, 1))
            assert bench.answer(bench.next()) == [1]
        bench.worker.halt()
        assert not any(thread.is_alive() for thread in early)
        assert {*bench.partition.threads} == {*early}, "they were attached meanwhile"


def test_a_worker_that_has_handed_its_link_over_may_serve_again_and_the_threads_of_before_end() -> None:
    """The second one is parked, and not waited for when the link is handed over."""
    with benched() as bench:
        bench.worker.serve(bench.endpoint)
        assert bench.worker.wait_until_started()
        first = set(bench.partition.threads)
        bench.worker.stop().result(PATIENCE)
        bench.worker.hand_over()
        bench.worker.serve(bench.endpoint)
        for thread in first:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in first)
        bench.put(bench.ticket(0, 1))
        assert bench.answer(bench.next()) == [1]
        bench.worker.halt()
        assert len(bench.partition.threads) == 4
        assert not any(thread.is_alive() for thread in bench.partition.threads)


@pytest.mark.parametrize("there_are", [0, 1])
def test_threads_that_could_not_be_started_early_are_when_the_worker_is_to_serve(
    there_are: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, start = [True] * there_are, threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    with benched() as bench:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            bench.worker.warm_up()
        monkeypatch.undo()
        bench.worker.serve(bench.endpoint)
        assert bench.worker.wait_until_started()
        assert len(bench.partition.threads) == 2
        bench.put(bench.ticket(0, 1))
        assert bench.answer(bench.next()) == [1]


def test_with_two_tickets_in_flight_one_is_enqueued_behind_the_one_that_runs(either: Bench) -> None:
    bench = either
    gate = bench.script.hold("run")
    bench.put(bench.ticket(0, 0))
    for number in range(1, 50):
        gate.wait_for_arrival()
        bench.put(bench.ticket(number % SLOTS, number))
        bench.wait_for_enqueued(number + 1)
        running, gate = gate, bench.script.hold("run")
        running.open()
        assert bench.answer(bench.next()) == [number - 1]
    gate.open()
    assert bench.answer(bench.next()) == [49]


def test_a_completion_is_reported_while_the_next_work_runs(either: Bench) -> None:
    bench = either
    gate = bench.begin(bench.ticket(0, 1), bench.ticket(1, 2))
    held = bench.script.hold("run")
    gate.open()
    held.wait_for_arrival()
    assert bench.answer(bench.next()) == [1]
    held.open()
    assert bench.answer(bench.next()) == [2]


@pytest.mark.parametrize("hosted", [False, True])
def test_tickets_that_arrived_are_enqueued_before_any_is_waited_for(hosted: bool) -> None:
    with benched() as bench:
        bench.device.on_host_cores = hosted
        bench.worker.serve(bench.endpoint)
        gate, second = bench.script.hold("run"), bench.ticket(1, 2)

        def meanwhile() -> (
            None
        ):  # While the first is being enqueued, which takes long enough for the worker to look for tickets again.
            bench.put(second)
            until = time.monotonic_ns() + 2 * BUNDLE
            while time.monotonic_ns() < until:
                pass

        bench.script.meanwhile.append(meanwhile)
        bench.put(bench.ticket(0, 1))
        gate.wait_for_arrival()
        bench.script.wait_for("enqueue", 2)
        gate.open()
        assert [bench.answer(bench.next()) for _ in range(2)] == [[1], [2]]


def test_no_memory_is_pinned_or_unpinned_while_tickets_are_served(either: Bench) -> None:
    bench = either
    before = [(pin.address, pin.nbytes, pin.closed) for pin in bench.device.pins]
    for slot in range(SLOTS):
        bench.put(bench.ticket(slot, *range(1 << slot)))
        assert bench.answer(bench.next()) == list(range(1 << slot))
    assert [(pin.address, pin.nbytes, pin.closed) for pin in bench.device.pins] == before


def test_a_block_outside_the_tenants_memory_fails_and_the_next_ticket_is_served(either: Bench) -> None:
    bench = either
    bench.put(bench.ticket(0, 1)._replace(start=1 << 40), bench.ticket(1, 2))
    failure = bench.next().failure
    assert failure
    assert failure.kind == "raised"
    assert "are not in" in failure.text
    assert bench.answer(bench.next()) == [2]


def test_shapes_larger_than_their_block_fail_and_nothing_beyond_it_is_read(either: Bench) -> None:
    """An HTTP process that another program has taken over could read the device process's memory by them."""
    bench = either
    bench.put(bench.ticket(0, 1)._replace(shapes=((1 << 40,),)), bench.ticket(1, 2))
    failure = bench.next().failure
    assert failure
    assert (failure.kind, failure.text) == ("raised", f"slot 0: input 'x' ends at byte {1 << 42} of {SMALLEST}")
    assert bench.answer(bench.next()) == [2]


def test_a_second_ticket_in_a_slot_in_flight_ends_the_worker_as_malformed(bench: Bench) -> None:
    ticket = bench.ticket(0, 1)
    gate = bench.begin(ticket)
    bench.put(ticket)
    bench.put(bench.ticket(1, 1))
    bench.wait_for_error()
    gate.open()
    assert [str(error) for error in bench.errors if isinstance(error, Malformed)] == [
        "a ticket in slot 0, in which a work is in flight"
    ]
    bench.worker.halt()


def test_outputs_that_do_not_fit_fail_as_outgrown_with_the_bytes_needed(either: Bench) -> None:
    bench = either
    ticket = bench.ticket(0, *range(SMALLEST // 4))
    assert ticket.capacity == SMALLEST
    bench.put(ticket)
    assert bench.next().failure == ("outgrown", str(2 * SMALLEST))


@pytest.mark.parametrize("point", ["enqueue", "run"])
def test_a_lost_device_fails_the_ticket_and_calls_on_lost(bench: Bench, point: str) -> None:
    error = DeviceLost("illegal address")
    bench.script.fail(point, error=error)
    bench.put(bench.ticket(0, 1))
    assert bench.next().failure == ("lost", "illegal address")
    assert bench.lost == [error]


def test_an_error_without_text_is_named_by_its_class(bench: Bench) -> None:
    bench.script.fail("run", error=MemoryError())
    bench.put(bench.ticket(0, 1))
    assert bench.next().failure == ("raised", "MemoryError")


def test_a_ticket_for_an_unloaded_model_fails(either: Bench) -> None:
    bench = either
    bench.put(bench.ticket(0, 1, model="gone/1#1"))
    assert bench.kind() == "raised"


def test_a_ticket_whose_deadline_has_passed_is_not_run(either: Bench) -> None:
    bench = either
    bench.put(bench.ticket(0, 1, deadline=time.monotonic() - 1))
    assert bench.kind() == "expired"
    assert bench.engine.computed == []


def test_a_ticket_cancelled_before_it_is_enqueued_is_not_run(either: Bench) -> None:
    bench = either
    first, second = bench.ticket(0, 1), bench.ticket(1, 2)
    gate = bench.begin(first)
    bench.worker.cancel(second.slot, second.serial)
    bench.put(second)
    assert bench.kind() == "cancelled"
    gate.open()
    assert bench.next().failure is None
    assert len(bench.engine.computed) == 1


def test_a_ticket_cancelled_while_it_is_being_enqueued_ends_early(bench: Bench) -> None:
    bench.script.hold("run")
    ticket = bench.ticket(0, 1)
    bench.script.meanwhile.append(lambda: bench.worker.cancel(ticket.slot, ticket.serial))
    bench.put(ticket)
    assert bench.kind() == "cancelled"


def test_cancelling_an_earlier_ticket_of_the_slot_has_no_effect(either: Bench) -> None:
    bench = either
    gate, old = bench.script.hold("run"), bench.ticket(0, 1)
    new = bench.ticket(0, 2)
    bench.worker.cancel(old.slot, old.serial)  # Late: another owner has the slot already.
    bench.put(new)
    gate.wait_for_arrival()
    bench.worker.cancel(old.slot, old.serial)
    gate.open()
    assert bench.answer(bench.next()) == [2]


def test_cancellations_over_another_link_have_no_effect(either: Bench) -> None:
    bench = either
    ticket = bench.ticket(0, 1)
    bench.worker.cancel(ticket.slot, ticket.serial)
    bench.worker.halt()
    bench.worker.serve(bench.endpoint._replace())
    bench.put(ticket)
    assert bench.answer(bench.next()) == [1]


def test_a_cancellation_outlasts_halting_and_serving_again(either: Bench) -> None:
    bench = either
    ticket = bench.ticket(0, 1)
    bench.worker.cancel(ticket.slot, ticket.serial)
    bench.worker.halt()
    bench.put(ticket)
    bench.worker.serve(bench.endpoint)
    assert bench.kind() == "cancelled"


def test_halt_waits_for_tickets_in_flight_and_leaves_the_rest_to_the_next_worker(either: Bench) -> None:
    bench = either
    gate = bench.begin(bench.ticket(0, 0))
    _, halted = in_a_thread(bench.worker.halt)
    wait_until_stopping(bench.worker)
    bench.put(bench.ticket(1, 1), bench.ticket(2, 2))
    assert not halted.done()
    gate.open()
    halted.result(PATIENCE)
    assert bench.answer(bench.next()) == [0]
    assert len(bench.engine.computed) == 1
    assert "not running" in repr(bench.worker)
    with ExitStack() as stack:
        following = bench.another(1)
        stack.callback(following.close)
        following.serve(bench.endpoint)
        assert [bench.answer(bench.next()) for _ in range(2)] == [[1], [2]]
        assert len(bench.engine.computed) == 3


@pytest.mark.parametrize("hosted", [False, True])
def test_alternating_workers_run_every_ticket_once_and_in_order(hosted: bool) -> None:
    """With alternately short and long works, so that the second thread is parked now and then."""
    with benched() as bench, ExitStack() as stack:
        bench.device.on_host_cores = hosted
        short, bench.engine.script.reach = bench.script.reach, bench.tarry  # type: ignore[method-assign]
        workers = cycle([bench.worker, bench.another(1)])
        stack.callback(next(workers).close)
        answers = []
        for turn in range(60):
            bench.engine.script.reach = (short, bench.tarry)[turn // 3 % 2]  # type: ignore[method-assign]
            worker = next(workers)
            worker.serve(bench.endpoint)
            bench.put(*[bench.ticket(slot, turn * 4 + slot) for slot in range(4)])
            if turn % 2:
                answers += [bench.answer(bench.next()) for _ in range(4)]
                worker.halt()
            else:
                worker.halt()
                worker.serve(bench.endpoint)
                answers += [bench.answer(bench.next()) for _ in range(4)]
                worker.halt()
        assert answers == [[number] for number in range(240)]


def test_a_worker_that_never_served_can_be_closed() -> None:
    with benched() as bench:
        bench.worker.halt()
        bench.worker.close()
        assert bench.partition.closed


def test_a_busy_worker_yields_the_gil_only_to_one_that_has_work(bench: Bench) -> None:
    """They share a GIL, for which the other may still be waiting."""
    waiting: list[bool] = []
    bench.priorities.join(bench.priorities.make(lambda: bool(waiting)))
    for _ in range(100):
        bench.rush()
    assert bench.naps == []
    waiting.append(True)
    for _ in range(100_000):
        bench.rush()
        if bench.naps:
            break
    assert bench.naps


def test_no_worker_yields_the_gil_to_one_whose_work_takes_long(bench: Bench) -> None:
    gate = bench.begin(bench.ticket(0, 1))
    with benched(bench.priorities) as busy:
        busy.worker.serve(busy.endpoint)
        for _ in range(100):
            busy.rush()
        assert busy.naps == bench.naps == []
    gate.open()
    assert bench.answer(bench.next()) == [1]


@pytest.mark.parametrize(("hosted", "shares_interpreter"), [(False, False), (True, False), (True, True), (False, True)])
def test_on_host_cores_completions_of_short_works_are_signalled_together(
    monkeypatch: pytest.MonkeyPatch, hosted: bool, shares_interpreter: bool
) -> None:
    rung: list[int] = []
    write = os.eventfd_write
    with benched() as bench:
        bench.device.on_host_cores = hosted
        bench.engine.script.reach = bench.tarry  # type: ignore[method-assign]
        bench.worker.serve(bench.endpoint._replace(link=bench.link._replace(shares_interpreter=shares_interpreter)))
        bench.rush()
        monkeypatch.setattr(os, "eventfd_write", lambda event, count: (rung.append(event), write(event, count)))
        for _ in range(20):
            bench.rush()
        monkeypatch.undo()
        rings = rung.count(bench.link.completions.event)
    assert (rings < 19 * SLOTS) == hosted


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_whose_thread_ended_has_no_gil_priority() -> None:
    with benched() as bench:
        bench.device.script.fail("attach")
        bench.worker.serve(bench.endpoint)
        bench.worker.halt()
        assert repr(bench.priorities) == "<GilPriorities of 0 workers>"


def test_tickets_that_need_preparation_are_deferred_and_others_overtake_them(either: Bench) -> None:
    bench = either
    prepared = bench.engine.prepares((2,))
    bench.put(bench.ticket(0, 1, 2), bench.ticket(1, 3), bench.ticket(2, 4, 5), bench.ticket(3, 6))
    assert [bench.answer(bench.next()) for _ in range(2)] == [[3], [6]]
    assert bench.link.completions.deferred() == 2
    prepared.set_result(None)  # The worker listens, and is woken by this as well.
    assert [bench.answer(bench.next()) for _ in range(2)] == [[1, 2], [4, 5]]
    assert bench.link.completions.deferred() == 0
    bench.put(bench.ticket(0, 7, 8))
    assert bench.answer(bench.next()) == [7, 8]


def test_prepared_tickets_are_resumed_a_few_at_a_time(either: Bench) -> None:
    bench = either
    """The lane does not count them as in flight: all at once would run before any later request, however urgent."""
    prepared = bench.engine.prepares((2,))
    bench.put(*[bench.ticket(slot, slot, slot) for slot in range(6)])
    bench.put(bench.ticket(6, 6))
    assert bench.answer(bench.next()) == [6]
    gate = bench.script.hold("run")
    prepared.set_result(None)
    gate.wait_for_arrival()
    bench.wait_for_enqueued(1 + MAX_RESUMED)
    assert len(bench.partition.stream.works) == MAX_RESUMED
    assert bench.link.completions.deferred() == 6 - MAX_RESUMED
    gate.open()
    assert [bench.answer(bench.next()) for _ in range(6)] == [[slot, slot] for slot in range(6)]


def test_a_failed_preparation_fails_its_tickets_and_later_ones(either: Bench) -> None:
    bench = either
    prepared = bench.engine.prepares((2,))
    bench.put(bench.ticket(0, 1, 2), bench.ticket(1, 3, 4), bench.ticket(2, 5))
    assert bench.answer(bench.next()) == [5]
    prepared.set_exception(ExecutionFailed("no kernel for this"))
    assert [bench.next().failure for _ in range(2)] == [("raised", "no kernel for this")] * 2
    bench.put(bench.ticket(0, 1, 2))
    assert bench.next().failure == ("raised", "no kernel for this")
    assert bench.link.completions.deferred() == 0


def test_a_device_lost_during_preparation_is_reported(bench: Bench) -> None:
    prepared, error = bench.engine.prepares((2,)), DeviceLost("illegal address")
    bench.put(bench.ticket(0, 1, 2), bench.ticket(1, 5))
    assert bench.answer(bench.next()) == [5]
    prepared.set_exception(error)
    assert bench.next().failure == ("lost", "illegal address")
    assert bench.lost == [error]


def test_a_deferred_ticket_can_be_cancelled_and_the_others_stay(either: Bench) -> None:
    bench = either
    prepared, ticket = bench.engine.prepares((2,)), bench.ticket(0, 1, 2)
    bench.put(ticket, bench.ticket(1, 3, 4), bench.ticket(2, 5))
    assert bench.answer(bench.next()) == [5]
    bench.worker.cancel(ticket.slot, ticket.serial)
    done = bench.next()
    assert (done.slot, done.failure) == (0, ("cancelled", "withdrawn before it began"))
    assert bench.link.completions.deferred() == 1
    prepared.set_result(None)
    assert bench.answer(bench.next()) == [3, 4]


def test_a_deferred_ticket_past_its_deadline_is_not_run(bench: Bench) -> None:
    prepared, deadline = bench.engine.prepares((2,)), time.monotonic() + 0.3
    bench.put(bench.ticket(0, 1, 2, deadline=deadline), bench.ticket(1, 5))
    assert bench.answer(bench.next()) == [5]
    while time.monotonic() <= deadline:
        pass
    prepared.set_result(None)
    assert bench.kind() == "expired"


def test_halt_does_not_wait_for_deferred_tickets_and_the_next_worker_resumes_them(either: Bench) -> None:
    bench = either
    prepared = bench.engine.prepares((2,))
    bench.put(bench.ticket(0, 1, 2), bench.ticket(1, 3, 4), bench.ticket(2, 5))
    assert bench.answer(bench.next()) == [5]
    bench.worker.halt()
    bench.put(bench.ticket(3, 6))
    with ExitStack() as stack:
        following = bench.another(1)
        stack.callback(following.close)
        following.serve(bench.endpoint)
        assert bench.answer(bench.next()) == [6]
        assert bench.link.completions.deferred() == 2
        prepared.set_result(None)
        assert [bench.answer(bench.next()) for _ in range(2)] == [[1, 2], [3, 4]]
        following.halt()
    assert len(bench.engine.computed) == 4


def test_tickets_prepared_while_no_worker_served_are_resumed_by_the_next(either: Bench) -> None:
    bench = either
    prepared = bench.engine.prepares((2,))
    bench.put(bench.ticket(0, 1, 2), bench.ticket(1, 5))
    assert bench.answer(bench.next()) == [5]
    bench.worker.halt()
    prepared.set_result(None)
    bench.worker.serve(bench.endpoint)
    assert bench.answer(bench.next()) == [1, 2]


def test_a_halted_worker_does_not_write_to_the_link(either: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = either
    """Its descriptors may be another file's by then."""
    prepared = bench.engine.prepares((2,))
    bench.put(bench.ticket(0, 1, 2), bench.ticket(1, 5))
    assert bench.answer(bench.next()) == [5]
    bench.worker.halt()
    written: list[int] = []
    monkeypatch.setattr(os, "eventfd_write", lambda event, count: written.append(event))
    prepared.set_result(None)
    bench.worker.cancel(0, 1)
    assert written == []
