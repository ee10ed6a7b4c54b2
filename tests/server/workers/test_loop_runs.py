"""Short models on the event loop: `run_now` of a worker over fakes, with the test's thread as that of the event loop."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest

from server.link.messages import Done, Failure
from server.workers import loop_runs, ticket_runner
from server.workers.loop_runs import BOUND
from server.workers.worker import Worker
from tests.contract import in_a_thread
from tests.fakes import PATIENCE

from .test_worker import NEVER, Bench, benched


class LoopBench(Bench):
    """A bench whose worker shares the interpreter with the HTTP side, on cores of the host.

    Runs take CPU time only where the test says so: this machine may be slow.
    """

    cpu_time = readings = 0

    def serve(self, shares_interpreter: bool = True, hosted: bool = True) -> None:
        self.device.on_host_cores = hosted
        self.endpoint = self.endpoint._replace(link=self.link._replace(shares_interpreter=shares_interpreter))
        self.serve_by(self.worker)

    def serve_by(self, worker: Worker) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ticket_runner, "LoopRuns", partial(loop_runs.LoopRuns, cpu_time=self._cpu_time))
            worker.serve(self.endpoint)

    def _cpu_time(self) -> int:
        self.readings += 1
        return self.cpu_time

    def run(self, *numbers: float, slot: int = 0, model: str = "m/1#1", deadline: float = NEVER) -> Done | None:
        """Ask for a run on this thread."""
        run_now = self.link.tickets.run_now
        return run_now(self.ticket(slot, *numbers, model=model, deadline=deadline)) if run_now else None

    def send(self, *numbers: float) -> Done:
        """One inference on the worker's thread."""
        self.put(self.ticket(0, *numbers))
        return self.next()

    def prove(self, *numbers: float) -> None:
        """Have the model run on the worker's thread until it may run here."""
        for _ in range(200):
            if self.run(*numbers):
                return
            self.send(*numbers)
        raise AssertionError("the model is not found to be short")

    def slow(self, inputs: Sequence[bytes]) -> Sequence[bytes]:
        """For `computing`: take much longer than a short model."""
        until = time.monotonic_ns() + 2 * BOUND
        while time.monotonic_ns() < until:
            pass
        self.cpu_time += 5 * BOUND
        return inputs

    @contextmanager
    def computing(self, compute: Callable[[Sequence[bytes]], Sequence[bytes]]) -> Iterator[None]:
        """The model computes this instead."""
        before, self.engine.compute = self.engine.compute, compute
        yield
        self.engine.compute = before


@pytest.fixture
def bench() -> Iterator[LoopBench]:
    with benched(kind=LoopBench) as bench:
        bench.serve()
        yield bench


def test_a_model_runs_on_the_thread_until_it_is_known_to_be_short_and_then_on_the_event_loop(bench: LoopBench) -> None:
    assert bench.run(1, 2) is None
    assert bench.answer(bench.send(1, 2)) == [1, 2]
    assert bench.run(1, 2) is None
    bench.prove(1, 2)
    ran = bench.partition.stream.ran
    done = bench.run(3, 4, slot=5)
    assert done
    assert done.slot == 5
    assert bench.answer(done) == [3, 4]
    assert 0 < done.began <= done.ended
    assert bench.partition.stream.ran == ran + 1
    assert bench.partition.threads[-1] is threading.current_thread()
    assert bench.worker.idle
    assert bench.link.completions.take() == []


def test_the_thread_goes_on_beside_the_event_loop(bench: LoopBench) -> None:
    bench.prove(1)
    for number in range(50):
        assert bench.answer(bench.run(number) or bench.send(number)) == [number]
        assert bench.answer(bench.send(number)) == [number]


def test_a_model_that_turns_slow_leaves_the_event_loop_until_it_is_short_again(bench: LoopBench) -> None:
    bench.prove(1)
    with bench.computing(bench.slow):
        assert bench.run(1)
        for _ in range(5):
            assert bench.run(1) is None
            bench.send(1)
    assert bench.run(1) is None
    bench.prove(1)


def test_the_cpu_time_is_not_read_for_each_of_several_runs_in_a_row(bench: LoopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.prove(1)
    monkeypatch.setattr(loop_runs, "BOUND", 10**12)  # As it is read once more after a run that took long, on a busy machine.
    monkeypatch.setattr(loop_runs, "BUDGET", 10**12)
    before = bench.readings
    monkeypatch.setattr(loop_runs, "FRESH", 10**12)
    for number in range(5):
        assert bench.run(number)
    assert bench.readings == before  # One of `prove` does for all of them.
    monkeypatch.setattr(loop_runs, "FRESH", -1)
    for number in range(5):
        assert bench.run(number)
    assert bench.readings == before + 5


def test_waits_for_the_core_or_the_gil_do_not_make_a_model_slow(bench: LoopBench) -> None:
    def wait(inputs: Sequence[bytes]) -> Sequence[bytes]:
        outputs = bench.slow(inputs)
        bench.cpu_time -= 5 * BOUND
        return outputs

    with bench.computing(wait):
        bench.prove(1)
        assert bench.run(1)
        assert bench.run(1)


@pytest.mark.parametrize(("shares_interpreter", "hosted"), [(False, True), (True, False)])
def test_nothing_runs_on_an_event_loop_of_several_tenants_or_for_a_gpu(shares_interpreter: bool, hosted: bool) -> None:
    with benched(kind=LoopBench) as bench:
        bench.serve(shares_interpreter, hosted)
        assert bench.link.tickets.run_now is None


def test_nothing_runs_while_a_work_is_in_flight(bench: LoopBench) -> None:
    bench.prove(1)
    gate = bench.begin(bench.ticket(1, 7))
    assert bench.run(1) is None
    gate.open()
    assert bench.answer(bench.next()) == [7]
    assert bench.run(1)


def test_shapes_that_have_to_be_prepared_again_are_left_to_the_worker(bench: LoopBench) -> None:
    bench.prove(1)
    prepared = bench.engine.prepares((1,))
    assert bench.run(1) is None
    prepared.set_result(None)
    assert bench.run(1)


def test_nothing_runs_while_another_thread_uses_the_partition(bench: LoopBench) -> None:
    bench.prove(1)
    executor = bench.engine.bind(bench.partition)
    slot = bench.link.arena.slot(7)
    ticket = bench.ticket(7, 1)
    inputs, room = slot.inputs(bench.engine.signature, ticket.shapes, ticket.capacity)
    loading = executor.enqueue(inputs, room)
    assert bench.run(1) is None
    loading.wait()
    assert bench.run(1)
    executor.close()


def test_a_ticket_that_is_late_cancelled_or_of_no_model_is_left_to_the_worker(bench: LoopBench) -> None:
    bench.prove(1)
    assert bench.run(1, deadline=time.monotonic() - 1) is None
    assert bench.run(1, model="gone/1#1") is None
    ticket = bench.ticket(0, 1)
    bench.worker.cancel(0, ticket.serial)
    assert bench.link.tickets.run_now
    assert bench.link.tickets.run_now(ticket) is None
    bench.put(ticket)
    assert bench.kind() == "cancelled"


@pytest.mark.parametrize("point", ["enqueue", "run"])
def test_a_run_that_fails_is_repeated_by_the_worker_which_reports_it(bench: LoopBench, point: str) -> None:
    bench.prove(1)
    bench.script.fail(point)
    assert bench.run(1) is None
    assert bench.worker.idle
    bench.script.fail(point)
    failure = bench.send(1).failure
    assert failure
    assert failure == Failure("raised", f"scripted to fail at {point}")
    assert bench.run(1)


def test_a_work_on_the_event_loop_is_in_flight_and_any_thread_can_stop_it(bench: LoopBench) -> None:
    bench.prove(1)
    gate = bench.script.hold("run")
    ticket = bench.ticket(3, 1)
    run_now = bench.link.tickets.run_now
    assert run_now
    _, done = in_a_thread(lambda: run_now(ticket))
    gate.wait_for_arrival()
    assert not bench.worker.idle
    assert bench.worker.oldest == ticket.serial
    bench.worker.cancel(3, ticket.serial)
    assert done.result(PATIENCE) is None
    bench.put(ticket)
    assert bench.kind() == "cancelled"
    gate.open()


def test_a_work_that_keeps_the_event_loop_is_stopped_and_repeated_by_the_worker(bench: LoopBench) -> None:
    bench.prove(1)
    gate = bench.script.hold("run")  # It runs for ever, without anybody who cancels it but the guard.
    assert bench.run(1) is None
    gate.open()
    assert bench.answer(bench.send(1)) == [1]


def test_after_halt_nothing_runs_until_the_next_worker_serves(bench: LoopBench) -> None:
    bench.prove(1)
    run_now = bench.link.tickets.run_now
    assert run_now
    bench.worker.halt()
    assert bench.link.tickets.run_now is None
    assert run_now(bench.ticket(0, 1)) is None
    other = bench.another(1)
    bench.serve_by(other)
    assert bench.run(1) is None  # How long it takes on this partition is not known yet.
    bench.prove(1)
    assert bench.device.partitions[1].threads[-1] is threading.current_thread()
    other.close()


def test_a_worker_that_is_asked_to_stop_runs_nothing_more(bench: LoopBench) -> None:
    bench.prove(1)
    bench.worker.stop().result(PATIENCE)
    assert bench.run(1) is None


def test_halt_waits_for_what_runs_on_the_event_loop(bench: LoopBench) -> None:
    bench.prove(1)
    gate = bench.script.hold("run")
    run_now = bench.link.tickets.run_now
    assert run_now
    ticket = bench.ticket(0, 1)
    _, done = in_a_thread(lambda: run_now(ticket))
    gate.wait_for_arrival()
    halted = in_a_thread(bench.worker.halt)[1]
    assert not halted.done()
    gate.open()
    halted.result(PATIENCE)
    done.result(PATIENCE)
    assert not bench.partition.stream.works


def test_an_event_loop_that_cannot_be_attached_runs_nothing(bench: LoopBench, caplog: pytest.LogCaptureFixture) -> None:
    assert bench.worker.wait_until_started()
    while bench.link.tickets.run_now:
        bench.device.script.fail("attach")
        bench.run(1)
        bench.send(1)
    assert "the event loop runs no models of" in caplog.text
    assert bench.answer(bench.send(2)) == [2]
