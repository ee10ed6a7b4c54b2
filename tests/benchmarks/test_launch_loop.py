"""The launch loop in C over a fake libcuda: the ring's protocol, completions, refusals, and taking turns with the worker."""

import ctypes
import json
import select
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.launch_loop import __main__ as command
from benchmarks.launch_loop import on_cuda
from benchmarks.launch_loop.launcher import Launcher, Options, ticket_body
from benchmarks.launch_loop.native import BLOCK, EVENT, FAILED, NAP, SPIN, STOPPED, UNKNOWN, WORD
from benchmarks.launch_loop.on_fake import FakeBench
from server.link import ring
from server.link.messages import Done, Ticket
from server.workers.gil_priority import GilPriorities
from server.workers.session import Endpoint
from server.workers.worker import Worker
from tests.engines.simulated import AFFINE, opened

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

KEY = "loop/1#1"
SLOTS = 24
CAPACITY = 65_536
PATIENCE = 20_000
"""Milliseconds."""


class Bench:
    """One link: the HTTP side here, and at its other end a worker and a loop for the same executor."""

    def __init__(self, fake: FakeBench) -> None:
        self.fake = fake
        self.model = fake.bind("tiny", fake.carve([0]))
        self.descriptors = ring.create(SLOTS, SLOTS * CAPACITY)
        self.http, self.link = ring.attach(self.descriptors), ring.attach(self.descriptors)
        self.launcher = Launcher(fake.cuda, self.link, self.descriptors, lambda: None)
        self._size = self.model.shapes[0][0]
        self._memory = np.frombuffer(self.http.arena.memory.view, np.uint8).reshape(SLOTS, CAPACITY)
        self._serials = count(1)
        self.register()

    def register(self, key: str = KEY) -> None:
        """Have the loop know tickets of this model key."""
        body = ticket_body(key, self.model.shapes)
        self.launcher.register(body, self.model.signature, self.model.shapes, self.model.recipe())

    def put(self, *slots: int, key: str = KEY, deadline: float = float("inf")) -> list[int]:
        """Tickets for these slots, whose inputs are drawn from the slot's number; their serials."""
        tickets = []
        for slot in slots:
            self._memory[slot] = 0
            self._memory[slot, : self._size] = self.model.draw(slot)
            ticket = Ticket(slot, next(self._serials), key, self.model.shapes, deadline, CAPACITY, slot * CAPACITY)
            self.http.tickets.write(ticket)
            page, body = self.http.arena.slot(slot).ticket, ticket_body(key, self.model.shapes)
            page[36 : 36 + len(body)] = body  # `marshal` may write the same in other bytes, which the loop would not know.
            page[32:36] = len(body).to_bytes(4, "little")
            tickets.append(ticket)
        self.http.tickets.put(tickets)
        return [ticket.serial for ticket in tickets]

    def take(self, wanted: int) -> list[Done]:
        """So many completions."""
        poller, found = select.poll(), []
        poller.register(self.http.completions.event, select.POLLIN)
        while len(found) < wanted:
            assert poller.poll(PATIENCE), f"only {len(found)} completions came"
            found += self.http.completions.take()
        assert len(found) == wanted
        return found

    def is_right(self, done: Done) -> bool:
        """Whether the slot has what the model makes of its input."""
        (extent,) = done.outputs
        output = self._memory[done.slot, extent.offset : extent.offset + extent.nbytes]
        return done.failure is None and bytes(output) == bytes(self.model.draw(done.slot)[: extent.nbytes] + 1)

    @contextmanager
    def looping(self, options: Options = Options(), why: int = STOPPED) -> Iterator[None]:  # noqa: B008
        """Serve with the loop in the block."""
        self.launcher.start(self.model.counted, options)
        try:
            yield
        finally:
            self.stopped = self.launcher.stop()
            self.model.count(self.launcher.counted)
        assert self.stopped.why == why

    @contextmanager
    def working(self) -> Iterator[None]:
        """Serve with the worker in the block."""

        def raise_(error: Exception) -> None:
            raise error

        executors: Any = {KEY: self.model, "other": self.model}
        worker = Worker(self.model.partition, executors, raise_, GilPriorities())
        worker.serve(Endpoint(self.link, self.fake.device.pin(0, 0)))
        try:
            yield
        finally:
            worker.halt()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        made = Bench(stack.enter_context(closing(FakeBench())))
        stack.callback(made.descriptors.close)
        stack.callback(made.launcher.close)
        yield made


WAYS = [(SPIN, EVENT), (SPIN, WORD), (NAP, EVENT), (NAP, WORD), (BLOCK, EVENT)]


@pytest.mark.parametrize(("wait", "signal"), WAYS)
@pytest.mark.parametrize("ahead", [1, 3, 16])
def test_answers_are_right_whatever_is_in_flight(bench: Bench, wait: int, signal: int, ahead: int) -> None:
    with bench.looping(Options(wait=wait, signal=signal, ahead=ahead, spin=1000, idle_spin=1000)):
        for turn in range(6):
            slots = [(turn + slot) % SLOTS for slot in range(SLOTS)]
            bench.put(*slots)
            found = bench.take(SLOTS)
            assert [done.slot for done in found] == slots
            assert all(bench.is_right(done) and 0 < done.began < done.ended for done in found)
    assert bench.stopped.launched == bench.model.counted == 6 * SLOTS


def test_a_ticket_whose_deadline_has_passed_is_refused(bench: Bench) -> None:
    with bench.looping():
        bench.put(0)
        bench.put(1, deadline=1.0)
        bench.put(2)
        found = {done.slot: done for done in bench.take(3)}
    assert found[1].failure is not None
    assert (found[1].failure.kind, found[1].outputs) == ("expired", ())
    assert bench.is_right(found[0])
    assert bench.is_right(found[2])
    assert (bench.stopped.launched, bench.stopped.refused) == (2, 1)


def test_a_cancelled_ticket_is_refused_and_the_next_in_its_slot_is_not(bench: Bench) -> None:
    (serial,) = bench.put(5)
    bench.launcher.cancel(5, serial)
    with bench.looping():
        (refused,) = bench.take(1)
        assert refused.failure is not None
        assert refused.failure.kind == "cancelled"
        bench.put(5)
        (done,) = bench.take(1)
        assert bench.is_right(done)


def test_no_completion_needs_the_interpreter(bench: Bench) -> None:
    class File(ctypes.Structure):
        _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))

    with bench.looping():
        bench.put(0)
        bench.take(1)  # The loop's thread runs.
        file = File(bench.http.completions.event, select.POLLIN)
        bench.put(1)
        assert ctypes.PyDLL(None).poll(ctypes.byref(file), 1, PATIENCE) == 1  # Blocks with the GIL.
        (done,) = bench.take(1)
        assert bench.is_right(done)


def test_an_unknown_ticket_is_left_to_the_worker_with_all_behind_it(bench: Bench) -> None:
    bench.launcher.start(bench.model.counted, Options())
    bench.put(0, 1)
    bench.put(2, key="other")
    bench.put(3)
    counts = bench.launcher.wait()
    bench.model.count(bench.launcher.counted)
    assert (counts.why, counts.launched) == (UNKNOWN, 2)
    assert sorted(done.slot for done in bench.take(2)) == [0, 1]
    with bench.working():
        found = bench.take(2)
    assert [done.slot for done in found] == [2, 3]
    assert all(map(bench.is_right, found))
    bench.register("other")
    with bench.looping():
        bench.put(4, key="other")
        (done,) = bench.take(1)
        assert bench.is_right(done)


def test_a_slot_too_small_for_the_outputs_is_left_to_the_worker(bench: Bench) -> None:
    bench.launcher.start(bench.model.counted, Options())
    bench.put(0)
    bench.take(1)
    ticket = Ticket(1, 9, KEY, bench.model.shapes, float("inf"), 100, 0)
    bench.http.tickets.write(ticket)
    bench.http.tickets.put([ticket])
    assert bench.launcher.wait().why == UNKNOWN


def test_worker_and_loop_take_turns(bench: Bench) -> None:
    for turn in range(8):
        with bench.working() if turn % 2 else bench.looping():
            bench.put(*range(7))
            assert all(map(bench.is_right, bench.take(7)))


def test_what_is_put_after_the_stop_is_run_by_the_next(bench: Bench) -> None:
    with bench.looping():
        bench.put(0)
        bench.take(1)
    bench.put(1, 2)
    with bench.working():
        assert all(map(bench.is_right, bench.take(2)))
    bench.put(3, 4)
    with bench.looping():
        assert all(map(bench.is_right, bench.take(2)))


def test_stop_waits_for_what_is_in_flight(bench: Bench) -> None:
    with bench.looping():
        bench.put(*range(SLOTS))
        bench.take(1)
    launched = bench.stopped.launched
    assert len(bench.take(launched - 1)) == launched - 1  # All were reported before the loop returned.
    with bench.working():
        left = bench.take(SLOTS - launched) if launched < SLOTS else []
    assert all(map(bench.is_right, left))


def test_an_error_of_the_driver_ends_the_loop_with_its_number(bench: Bench) -> None:
    bench.fake.cuda.fake_fail_after(2)
    try:
        bench.launcher.start(bench.model.counted, Options())
        bench.put(0, 1, 2)
        counts = bench.launcher.wait()
    finally:
        bench.fake.cuda.fake_fail_after(1 << 62)
    assert (counts.why, counts.error, counts.launched) == (FAILED, 700, 2)
    bench.model.count(bench.launcher.counted)


def test_the_whole_comparison_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "loop.json"
    arguments = ["--device", "fake", "--models", "tiny", "--seconds", "0.02", "--rounds", "1", "--output", str(output)]
    assert command.main(arguments) == 0
    found = json.loads(output.read_text())
    assert {row["section"] for row in found["medians"]} == set(command.SECTIONS)
    assert [row["flaw"] for row in found["rows"] if row["flaw"]] == []
    assert found["failures"] == []
    assert "closed: tiny, 1 tenants" in capsys.readouterr().out


def test_a_recipe_has_what_the_executor_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a simulated GPU, whose handles are objects."""
    monkeypatch.setattr(on_cuda, "number", lambda handle: handle)
    monkeypatch.setattr(on_cuda, "_current_context", lambda: 7)
    with opened(tmp_path) as simulated:
        executor = simulated.bind(AFFINE)
        shape = (2, 3)
        (x,), room = simulated.pinned(np.ones(shape, np.float32)), simulated.room()
        model = on_cuda.CudaModel.__new__(on_cuda.CudaModel)
        model.name, model.executor, model.partition, model.shapes = "affine", executor, simulated.partition, (shape,)
        model._executor = executor
        executor.enqueue([x], room).wait()
        counted, recipe = model.counted, model.recipe()
        table = np.frombuffer((ctypes.c_char * (recipe.length * 2 * 24)).from_address(recipe.tables), np.uint64).reshape(
            recipe.length, 2, 3
        )[(counted - 1) % recipe.length]
        assert table.tolist() == [[x.address, recipe.device[0], 24], [recipe.device[1], room.address, 24]]
        assert (recipe.outputs, recipe.context, recipe.stream) == ((shape,), 7, simulated.partition.stream.handle)
        model.count(counted + 16)  # As if a loop had run so many: the device has the same table next.
        executor.enqueue([x], room).wait()
        assert model.counted == counted + 17
        executor.close()
