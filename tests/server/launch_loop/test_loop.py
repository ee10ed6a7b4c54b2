"""The launch loop over a fake driver: what it runs alone, what it leaves to the worker, how it ends, and what is revoked."""

import ctypes
import os
import select
import time
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import pytest

from engines import Recipe, Signature, TensorSpec
from partitions import DeviceLost
from server.launch_loop.library import SWITCH, open_library
from server.launch_loop.loop import MOST_ENTRIES, LaunchLoop, Twin, open_loop
from server.link.encoding import Serializer, decode_request
from server.link.messages import NOWHERE, Failure, Malformed
from server.workers.session import EXPIRED, WITHDRAWN, Session
from server.workers.ticket_runner import BUNDLE
from tests.contract import in_a_thread
from tests.fakes import FakeEngine
from tests.launchable import RING, LaunchableEngine, LaunchableExecutor, address_of, needs_a_compiler, open_fake_cuda
from tests.server.workers.test_worker import FP32, PATIENCE, SIGNATURE, SLOTS, Bench, benched

pytestmark = needs_a_compiler


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A bench whose loop knows tickets of one number."""
    with benched(launchable=True) as bench:
        bench.worker.serve(bench.endpoint)
        bench.teach()
        yield bench


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """The same, where an inference that is launched takes 20 ms and needs no interpreter."""
    monkeypatch.setattr(LaunchableEngine, "duration", 20_000_000)
    with benched(launchable=True) as bench:
        bench.worker.serve(bench.endpoint)
        bench.teach()
        yield bench


def readable(bench: Bench) -> bool:
    """Whether a call of `listen` would return at once."""
    return bool(select.select([bench.link.tickets.event, bench.link.tickets.wakes], [], [], 0)[0])


def opened(bench: Bench) -> LaunchLoop:
    """A loop of its own over the link of a bench, whose worker serves no more."""
    bench.worker.serve(bench.endpoint)
    bench.worker.halt()
    loop = open_loop(bench.link, BUNDLE, EXPIRED, WITHDRAWN, {})
    assert loop
    return loop


def executor(bench: Bench) -> LaunchableExecutor:
    found = bench.engine.executors[0]
    assert isinstance(found, LaunchableExecutor)
    return found


def test_known_tickets_are_launched_and_never_enqueued(bench: Bench) -> None:
    for number in range(40):
        bench.put(bench.ticket(number % SLOTS, number))
        assert bench.answer(bench.next()) == [number]
    assert (executor(bench).launched, bench.script.reached["enqueue"]) == (41, 0)


def test_an_output_that_is_not_asked_for_is_not_copied_by_the_loop_either(timed: Bench) -> None:
    """As in an executor: the size of its row is 0, so the copies pass over it."""
    for turn, slot in enumerate((0, 1, 2)):
        ticket, memory = timed.ticket(slot, turn)._replace(unasked=1), timed.link.arena.slot(slot)
        memory.view[4:] = untouched = b"\xee" * (memory.capacity - 4)
        timed.put(ticket)
        assert timed.next().outputs == (NOWHERE,)
        if turn:  # The first is the worker's, and this engine leaves nothing out.
            assert memory.view[4:] == untouched
    assert (executor(timed).launched, timed.script.reached["enqueue"]) == (3, 1)


def test_known_and_unknown_tickets_are_answered_in_order(bench: Bench) -> None:
    """Unknown are those of a new shape; each becomes known."""
    numbers = [1, 1, 2, 1, 3, 2, 1, 4]
    for turn in range(30):
        bench.put(*[bench.ticket(slot, *([turn] * count)) for slot, count in enumerate(numbers)])
        dones = [bench.next() for _ in numbers]
        assert [done.slot for done in dones] == list(range(len(numbers)))
        assert [bench.answer(done) for done in dones] == [[turn] * count for count in numbers]
    assert bench.script.reached["enqueue"] == 3


def test_a_model_that_has_no_recipe_is_run_by_the_worker_in_its_turn(bench: Bench) -> None:
    executor(bench).launchable = False
    for turn in range(30):
        counts = [1, 2, 2, 1, 2, 1, 1, 2]
        bench.put(*[bench.ticket(slot, *([turn] * count)) for slot, count in enumerate(counts)])
        assert [bench.next().slot for _ in counts] == list(range(SLOTS))
    assert (executor(bench).launched, bench.script.reached["enqueue"]) == (1 + 30 * 4, 30 * 4)


def test_long_works_of_the_worker_are_pipelined_and_the_loop_takes_over_again(bench: Bench) -> None:
    """After a long work two threads serve; one must be parked before the other runs the loop."""
    executor(bench).launchable = False
    short, bench.script.reach = bench.script.reach, bench.tarry  # type: ignore[method-assign]
    for turn in range(20):
        bench.put(*[bench.ticket(slot, turn, turn) for slot in range(4)])
        assert [bench.next().slot for _ in range(4)] == [0, 1, 2, 3]
        bench.put(*[bench.ticket(slot, turn) for slot in range(4)])
        assert [bench.next().slot for _ in range(4)] == [0, 1, 2, 3]
    bench.script.reach = short  # type: ignore[method-assign]
    assert executor(bench).launched == 1 + 20 * 4


def test_more_works_than_the_ring_of_tables_has_are_launched_in_turn() -> None:
    with benched(launchable=True) as bench:
        bench.worker.serve(bench.endpoint)
        for _ in range(30):
            bench.rush()
        assert executor(bench).launched > 200


def test_as_many_works_are_in_flight_as_there_are_copy_tables_and_no_more() -> None:
    """A table that is written before the graph has read it gives one request the answer to another."""
    in_flight: list[int] = []
    with benched(launchable=True, slots=3 * RING) as bench:
        runs = executor(bench)
        ask, make = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p), runs.recipe

        @ask
        def query(event: int) -> int:
            in_flight.append(runs.launched - runs.ended)
            found: int = open_fake_cuda().cuEventQuery(ctypes.c_void_p(event))
            return found

        runs.recipe = lambda *given: make(*given)._replace(query=address_of(query))  # type: ignore[method-assign, union-attr]
        bench.worker.serve(bench.endpoint)
        bench.teach()
        gate = bench.begin(*[bench.ticket(slot, slot) for slot in range(3 * RING)])
        bench.wait_for_enqueued(RING)
        asked = len(in_flight)
        until = time.monotonic() + PATIENCE
        while len(in_flight) == asked:
            assert time.monotonic() < until, "the loop waits for nothing"
            time.sleep(0)
        gate.open()
        assert [bench.answer(bench.next()) for _ in range(3 * RING)] == [[slot] for slot in range(3 * RING)]
    assert max(in_flight) == RING


def test_a_completion_does_not_wait_for_a_long_work_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many completions may be collected while works are short."""
    monkeypatch.setattr("server.workers.worker.BUNDLE", 10**15)
    with benched(launchable=True) as bench:
        bench.worker.serve(bench.endpoint)
        bench.teach()
        short = bench.script.hold("run")
        bench.put(bench.ticket(0, 0), bench.ticket(1, 1))
        short.wait_for_arrival()
        long = bench.script.hold("run")
        short.open()
        long.wait_for_arrival()
        assert bench.answer(bench.next()) == [0]
        long.open()
        assert bench.answer(bench.next()) == [1]


def test_after_long_works_short_ones_are_soon_answered_when_they_end(timed: Bench) -> None:
    """The loop sleeps for most of the time that it expects a work to take, so it sees no earlier end."""

    def takes() -> int:
        timed.put(timed.ticket(0, 3))
        done = timed.next()
        return done.ended - done.began

    assert min(takes() for _ in range(4)) >= 20_000_000
    executor(timed).take(1_000_000)
    assert min([takes() for _ in range(20)][10:]) < 2_000_000


def test_completions_need_no_interpreter(timed: Bench) -> None:
    class File(ctypes.Structure):
        _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))

    file = File(timed.link.completions.event, select.POLLIN)
    timed.put(timed.ticket(0, 3))
    assert ctypes.PyDLL(None).poll(ctypes.byref(file), 1, PATIENCE * 1000) == 1  # Blocks with the GIL.
    assert timed.next().failure is None


def test_the_loop_refuses_tickets_that_are_cancelled_or_too_late(timed: Bench) -> None:
    tickets = [timed.ticket(slot, slot) for slot in range(SLOTS)]
    tickets[6] = tickets[6]._replace(deadline=time.monotonic() - 1)
    timed.worker.cancel(tickets[5].slot, tickets[5].serial)
    timed.put(*tickets)
    dones = {done.slot: done for done in [timed.next() for _ in tickets]}
    assert dones[5].failure == Failure("cancelled", "withdrawn before it began")
    assert dones[6].failure == Failure("expired", "Request timeout expired before it began")
    assert [slot for slot, done in dones.items() if done.failure is None] == [0, 1, 2, 3, 4, 7]


def test_what_is_in_flight_is_known_while_the_loop_runs(bench: Bench) -> None:
    gate, ticket = bench.script.hold("run"), bench.ticket(0, 1)
    assert bench.worker.idle
    bench.put(ticket)
    gate.wait_for_arrival()
    until = time.monotonic() + PATIENCE
    while bench.worker.oldest != ticket.serial:  # The device may begin before the loop has said that it has launched.
        assert time.monotonic() < until
    assert not bench.worker.idle
    gate.open()
    bench.next()
    until = time.monotonic() + PATIENCE
    while not (bench.worker.idle and bench.worker.oldest is None):
        assert time.monotonic() < until


def test_abandon_fails_what_is_not_launched_and_lets_the_rest_end(bench: Bench) -> None:
    gate = bench.begin(bench.ticket(0, 0))
    bench.worker.abandon(Failure("stopped", "why"))
    bench.put(bench.ticket(1, 1))
    gate.open()
    assert bench.answer(bench.next()) == [0]
    assert bench.next().failure == ("stopped", "why")
    assert executor(bench).launched == 2


def test_halt_while_tickets_arrive_leaves_the_rest_to_the_next_worker(bench: Bench) -> None:
    for turn in range(20):
        bench.put(*[bench.ticket(slot, turn) for slot in range(SLOTS)])
        bench.worker.halt()
        assert not executor(bench).partition.stream.works
        bench.worker.serve(bench.endpoint)
        assert sorted(bench.next().slot for _ in range(SLOTS)) == list(range(SLOTS))


def test_a_halt_after_many_more_tickets_than_slots_and_no_rest_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop takes tickets as they are put. Without a rest it has no need to look at how many were announced."""
    monkeypatch.setattr(LaunchableEngine, "duration", 30_000)
    with benched(launchable=True) as bench:
        bench.worker.serve(bench.endpoint)
        bench.teach()
        for turn in range(20):
            bench.put(*[bench.ticket(slot, turn) for slot in range(SLOTS)])
            for _ in range(20 * SLOTS):
                bench.put(bench.ticket(bench.next().slot, turn))
            bench.worker.halt()
            assert bench.errors == []
            bench.worker.serve(bench.endpoint)
            assert sorted(bench.next().slot for _ in range(SLOTS)) == list(range(SLOTS))


def test_the_next_worker_launches_the_first_ticket_without_having_run_one_like_it(bench: Bench) -> None:
    following = bench.another(1)
    following.take_over(bench.endpoint, bench.worker)
    bench.worker.retire()
    following.serve(bench.endpoint)
    bench.put(bench.ticket(0, 5))
    assert bench.answer(bench.next()) == [5]
    following.close()
    _, second = bench.engine.executors
    assert (second.launched, bench.script.reached["enqueue"]) == (1, 0)


def test_what_the_next_worker_has_no_model_or_no_graph_for_is_left_to_it(bench: Bench) -> None:
    without, unready = bench.another(1), bench.another(2)
    left = without.executors.pop("m/1#1")
    _, _, third = bench.engine.executors
    assert isinstance(third, LaunchableExecutor)
    third.launchable = False
    for following in (without, unready):
        following.take_over(bench.endpoint, bench.worker)
    bench.worker.retire()
    unready.serve(bench.endpoint)
    bench.put(bench.ticket(0, 5))
    assert bench.answer(bench.next()) == [5]
    assert (third.launched, bench.script.reached["enqueue"]) == (0, 1)
    unready.close()
    left.close()
    without.close()


def test_a_worker_that_was_made_ready_and_does_not_serve_leaves_the_link_alone(bench: Bench) -> None:
    following = bench.another(1)
    following.take_over(bench.endpoint, bench.worker)
    following.close()
    bench.put(bench.ticket(0, 5))
    assert bench.answer(bench.next()) == [5]
    assert executor(bench).launched == 2


def test_what_is_revoked_between_two_workers_is_learnt_again(bench: Bench) -> None:
    following = bench.another(1)
    following.take_over(bench.endpoint, bench.worker)
    _, second = bench.engine.executors
    assert isinstance(second, LaunchableExecutor)
    second.revoke()
    bench.worker.retire()
    following.serve(bench.endpoint)
    for number in range(2):
        bench.put(bench.ticket(0, number))
        assert bench.answer(bench.next()) == [number]
    following.close()
    assert (second.launched, bench.script.reached["enqueue"]) == (1, 1)


def test_revoking_waits_for_what_is_in_flight_and_the_loop_learns_again(bench: Bench) -> None:
    gate = bench.begin(bench.ticket(0, 0))
    assert bench.worker.runner
    loop, until = bench.worker.runner.session.loop, time.monotonic() + PATIENCE
    assert loop
    wakes = loop.wakes
    _, revoked = in_a_thread(executor(bench).revoke)
    while loop.wakes == wakes:
        assert time.monotonic() < until, "the loop was not woken"
        time.sleep(0)
    assert not revoked.done()
    gate.open()
    revoked.result(PATIENCE)
    assert bench.answer(bench.next()) == [0]
    launched = executor(bench).launched
    bench.put(bench.ticket(0, 1))
    assert bench.answer(bench.next()) == [1]
    assert (executor(bench).launched, bench.script.reached["enqueue"]) == (launched, 1)
    bench.put(bench.ticket(0, 2))
    assert bench.answer(bench.next()) == [2]
    assert executor(bench).launched == launched + 1


def test_revoking_at_any_moment_loses_no_ticket(bench: Bench) -> None:
    for turn in range(60):
        bench.put(*[bench.ticket(slot, turn) for slot in range(SLOTS)])
        executor(bench).revoke()
        assert [bench.answer(bench.next()) for _ in range(SLOTS)] == [[turn]] * SLOTS


def test_what_is_revoked_while_it_is_learnt_is_not_kept() -> None:
    """Its graph is of an address that is free by now."""
    with benched(launchable=True) as bench:
        runs, loop = executor(bench), opened(bench)
        make = runs.recipe

        def recipe(*given: Any) -> Recipe | None:
            made = make(*given)
            runs.revoke()
            return made

        runs.recipe = recipe  # type: ignore[method-assign]
        ticket = bench.ticket(0, 1)
        bench.put(ticket)
        loop.learn(ticket, runs, None)
        assert not loop.knows_any
        runs.recipe = make  # type: ignore[method-assign]
        loop.learn(ticket, runs, None)
        assert loop.knows_any
        loop.close()


def test_what_is_revoked_just_before_the_loop_runs_is_not_launched() -> None:
    """The revocation found that it did not run, so nothing would wake it; and it waits for its turn to forget."""
    with benched(launchable=True) as bench:
        runs, loop = executor(bench), opened(bench)
        known, other = bench.ticket(0, 1), bench.ticket(1, 1, 1)
        bench.put(known, other, bench.ticket(2, 1, 1, 1))
        loop.learn(known, runs, None)

        class Late:
            """An executor whose recipes are revoked, in another thread, while the loop takes one of them down."""

            recipe = runs.recipe

            @property
            def engine(self) -> FakeEngine:
                if loop.knows_any:
                    revoking.append(in_a_thread(runs.revoke)[1])
                    until = time.monotonic() + PATIENCE
                    while loop.knows_any:
                        assert time.monotonic() < until, "nothing was revoked"
                        time.sleep(0)
                return runs.engine

        revoking: list[Future[None]] = []
        loop.learn(other, Late(), None)
        assert loop.run(loop.wakes) is None
        assert not loop.left_one, "it ran"
        assert runs.launched == 0
        revoking[0].result(PATIENCE)
        loop.close()


def test_what_was_cancelled_before_the_loop_was_opened_is_refused() -> None:
    with benched(launchable=True) as bench:
        opened(bench).close()
        cancelled, unknown = bench.ticket(0, 1), bench.ticket(1, 1, 1)
        loop = open_loop(bench.link, BUNDLE, EXPIRED, WITHDRAWN, {cancelled.slot: cancelled.serial})
        assert loop
        bench.put(cancelled, unknown)
        loop.learn(cancelled, executor(bench), None)
        loop.run(loop.wakes)
        assert bench.kind() == "cancelled"
        assert executor(bench).launched == 0
        loop.close()


def test_a_model_without_a_graph_on_the_wide_partition_is_launched_at_home_after_a_while() -> None:
    with benched(launchable=True) as bench:
        loop, ticket, wide = opened(bench), bench.ticket(0, 1), bench.another(1)
        bench.put(ticket)
        home, without = bench.engine.executors
        assert isinstance(without, LaunchableExecutor)
        without.launchable = False
        known = []
        for _ in range(20):
            loop.learn(ticket, home, None, Twin(without, None))
            known.append(loop.knows_any)
        assert (known[0], known[-1]) == (False, True)
        loop.close()
        wide.close()


def test_outputs_that_a_completion_has_no_room_for_are_left_to_the_worker() -> None:
    """The worker answers such a ticket with the reason; the loop would write past the page."""
    many = tuple(TensorSpec(f"y{number}", FP32, (1,) * 400) for number in range(30))

    class Wordy:
        """An executor with more, and longer, shapes of outputs than a page holds."""

        engine = SimpleNamespace(signature=Signature(SIGNATURE.inputs, many))

        def __init__(self, runs: LaunchableExecutor) -> None:
            self._make = runs.recipe

        def recipe(self, *given: Any) -> Recipe | None:
            made = self._make(*given)
            assert made
            return made._replace(outputs=tuple(spec.shape for spec in many), addresses=made.addresses[:1] * 31)

    with benched(launchable=True) as bench:
        loop, ticket = opened(bench), bench.ticket(0, 1)
        bench.put(ticket)
        loop.learn(ticket, Wordy(executor(bench)), None)
        assert not loop.knows_any
        loop.close()


def test_revoking_after_the_halt_writes_nothing_to_the_link(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.worker.halt()
    monkeypatch.setattr("os.eventfd_write", lambda event, count: pytest.fail("its descriptors may be another file's"))
    executor(bench).revoke()


def test_a_declined_shape_is_launchable_after_a_revocation(bench: Bench) -> None:
    executor(bench).launchable = False
    for _ in range(2):
        bench.put(bench.ticket(0, 1, 2))
        bench.next()
    executor(bench).launchable = True
    executor(bench).revoke()
    for _ in range(2):
        bench.put(bench.ticket(0, 1, 2))
        bench.next()
    assert executor(bench).launched == 2


@pytest.mark.parametrize("lost", [False, True])
def test_an_error_of_the_device_fails_all_that_is_in_flight(bench: Bench, lost: bool) -> None:
    error = DeviceLost("illegal address")
    gate = bench.begin(*[bench.ticket(slot, slot) for slot in range(3)])
    bench.wait_for_enqueued(3)
    bench.script.fail("run", nth=0, error=error if lost else None)
    bench.script.reached["run"] -= 1
    held = bench.script.hold("run")
    gate.open()
    held.open()
    dones = [bench.next() for _ in range(3)]
    assert sorted(done.slot for done in dones) == [0, 1, 2]
    kinds = [done.failure.kind for done in dones if done.failure]
    assert set(kinds) == {"lost" if lost else "raised"}
    assert bench.lost == ([error] if lost else [])


def test_a_launch_that_fails_fails_its_ticket_and_those_before_it_end(bench: Bench) -> None:
    open_fake_cuda().fake_fail_after(2)
    try:
        bench.put(*[bench.ticket(slot, slot) for slot in range(3)])
        dones = [bench.next() for _ in range(3)]
    finally:
        open_fake_cuda().fake_fail_after(1 << 62)
    assert [done.failure and done.failure.kind for done in sorted(dones)] == [None, None, "lost"]
    assert len(bench.lost) == 1


def test_a_slot_that_does_not_exist_ends_the_worker(bench: Bench) -> None:
    """The HTTP side can write anything there."""
    put = bench.link.arena.total_put
    bench.link.arena.cells(0)[int(put[0]) % SLOTS] = 1 << 31
    put[0] += 1
    os.eventfd_write(bench.link.tickets.event, 1)
    bench.wait_for_error()
    assert [(type(error), str(error)) for error in bench.errors] == [(Malformed, f"slot {1 << 31} of {SLOTS}")]
    bench.worker.halt()


@pytest.mark.parametrize("changes", [{"after": 7}, {"capacity": 0}], ids=str)
def test_a_ticket_that_differs_in_its_head_is_not_launched(bench: Bench, changes: dict[str, int]) -> None:
    """A part of an answer is no inference of its own; and outputs would be written behind a block without room for them."""
    launched = executor(bench).launched
    bench.put(bench.ticket(0, 1)._replace(**changes))
    bench.next()
    assert executor(bench).launched == launched


@pytest.mark.parametrize("announced", [SLOTS + 1, (1 << 32) - 1, 1 << 32, (1 << 64) - 2])
def test_more_tickets_than_slots_end_the_worker(bench: Bench, announced: int) -> None:
    bench.rush()
    os.eventfd_write(bench.link.tickets.event, announced)
    bench.wait_for_error()
    assert [type(error) for error in bench.errors] == [Malformed]
    bench.worker.halt()


def test_a_count_of_tickets_that_were_not_put_launches_none(bench: Bench) -> None:
    bench.rush()
    launched, total = executor(bench).launched, bench.link.arena.total_put
    before = total[0]
    total[0] = before + SLOTS + 1
    bench.link.tickets.wake()
    bench.worker.stop().result(PATIENCE)
    bench.worker.halt()
    assert executor(bench).launched == launched
    total[0] = before


@pytest.mark.parametrize("blocks", [True, False])
def test_whether_the_descriptor_blocks_is_nothing_to_the_loop(bench: Bench, blocks: bool) -> None:
    """The HTTP side may change that, as the descriptor is the same for both."""
    for _ in range(3):
        os.set_blocking(bench.link.tickets.event, blocks)
        bench.rush()
    assert bench.errors == []


def test_equal_tickets_are_equal_bytes_whatever_refers_to_their_parts() -> None:
    """An encoding may refer to what was written before, if it is the same object."""
    one, other = (tuple(range(300, 302)) for _ in range(2))
    first, second = ("".join(["m/", "1#1"]), (one, one), 0, 0, False), ("m/1#1", (one, other), 0, 0, False)
    assert Serializer(decode_request).encode(first) == Serializer(decode_request).encode(second)
    assert Serializer(decode_request).decode(Serializer(decode_request).encode(first)) == first


def test_more_shapes_than_the_loop_keeps_are_all_answered(bench: Bench) -> None:
    for _ in range(2):
        for length in range(1, MOST_ENTRIES + 20):
            bench.put(bench.ticket(0, *[1.0] * length))
            assert bench.next().slot == 0


def test_the_switch_turns_the_loop_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    open_library.cache_clear()
    try:
        with benched(launchable=True) as bench:
            bench.worker.serve(bench.endpoint)
            for _ in range(3):
                bench.put(bench.ticket(0, 1))
                bench.next()
            assert executor(bench).launched == 0
    finally:
        open_library.cache_clear()


def test_a_thread_that_ends_the_last_work_wakes_the_one_that_listens_in_vain(bench: Bench) -> None:
    """It left tickets to the loop while that work was in flight, and nothing else would wake it."""
    bench.worker.halt()
    tickets = bench.link.tickets
    loop = open_loop(bench.link, BUNDLE, EXPIRED, WITHDRAWN, {})
    session = Session(bench.endpoint, bench.priorities.make(tickets.waiting), Semaphore(0), loop)
    bench.put(bench.ticket(0, 1), bench.ticket(1, 1))
    while not tickets.hand_over()[1]:  # The halt may have left a wake-up.
        tickets.add_unread(tickets.listen())
    session.wake_listener(in_flight=True)
    assert not readable(bench)
    session.wake_listener(in_flight=False)
    assert readable(bench)
