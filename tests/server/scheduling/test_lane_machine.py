"""Random requests over a lane whose device side ends, is replaced, and does its work, in any order.

Every request ends exactly once, the queue keeps its order, what is in flight was sent once and over the link in use, and in the
end no slot and no memory is taken.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.errors import Failed, RequestError, Unavailable
from server.link import ring as links
from server.link.blocks import UNIT
from server.link.messages import Done, Failure, Ticket
from server.link.ring import Descriptors
from server.link.slots import Slot
from server.scheduling.lane import Lane
from server.scheduling.scheduler import Scheduler
from tests.memory import MEMORY

from .hand import BATCHING, ROWS, SHAPES, Hand, rows_out, settle

IN_FLIGHT, QUEUE, SLOTS = 2, 6, 20
LOST = "the device's process has ended"


class Asked(NamedTuple):
    """A request: its slot, and how it ended."""

    slot: Slot
    ends: list[Done | RequestError]


class LaneMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.made: list[Descriptors] = []
        self.memory = links.attach(self._create(MEMORY)).arena.memory
        link, self.hand = self._attach(self.made[0])
        self.scheduler = Scheduler(QUEUE, IN_FLIGHT)
        self.lane = Lane("acme", self.scheduler, link, self.hand)
        self.lane.open(self.loop)
        self.asked: list[Asked] = []
        self.dead = False
        self.relinking: tuple[Hand, asyncio.Task[bool]] | None = None

    def teardown(self) -> None:
        """A last device side does all that is left."""
        self._run(self._finish())
        assert all(len(each.ends) == 1 for each in self.asked)
        for each in self.asked:
            self.lane.release(each.slot)
        assert self.lane.slots.statistics()[::2] == (0, 0)
        assert self.lane.statistics()[:3] == (0, 0, 0)
        self.lane.close(self.loop)
        self.loop.close()
        for descriptors in self.made:
            descriptors.close()

    async def _finish(self) -> None:
        self.lane.suspend("")
        if self.dead and not self.relinking:
            self._begin_relink()
        for _ in range(100):
            if not self.relinking and not self.hand.tickets:
                return
            if self.hand.tickets:
                self._end_oldest(None)
            await settle()
            self._look()
        raise AssertionError("requests are left")

    def _create(self, nbytes: int = UNIT) -> Descriptors:
        self.made.append(links.create(SLOTS, nbytes))
        return self.made[-1]

    def _attach(self, descriptors: Descriptors) -> tuple[links.Link, Hand]:
        here, there = (links.attach(descriptors, self.memory) for _ in range(2))
        self._open(here)
        return here, Hand(there)

    def _open(self, here: links.Link) -> None:
        """The lane is about to get this link."""

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)

    def _turn(self) -> None:
        self._run(settle())
        self._look()

    def _look(self) -> None:
        """See which link is used; everything in flight, and nothing else, was launched over it."""
        if self.relinking and self.relinking[1].done():
            assert self.relinking[1].result()
            self.hand, self.relinking, self.dead = self.relinking[0], None, False
        serials = [ticket.serial for ticket in self.hand.tickets]
        assert len(set(serials)) == len(serials)
        assert self._in_flight == {ticket.slot for ticket in self.hand.tickets}

    @property
    def _in_flight(self) -> frozenset[int]:
        return self.scheduler.in_flight

    def _on_end(self, asked: Asked, end: Done | RequestError) -> None:
        asked.ends.append(end)

    @rule(batched=st.booleans(), rows=st.lists(st.integers(1, 2), min_size=1, max_size=4), priority=st.integers(0, 2))
    def submit(self, batched: bool, rows: list[int], priority: int) -> None:
        """Several requests in one iteration of the event loop, so that batches form."""

        async def work() -> None:
            for count in rows:
                with suppress(RequestError):
                    self._submit(batched, count, priority)

        self._run(work())
        self._turn()

    @rule(
        batched=st.lists(st.booleans(), min_size=1, max_size=4),
        index=st.integers(0),
        ends=st.sampled_from(["", "kept", "lost"]),
    )
    def submit_and_release(self, batched: list[bool], index: int, ends: str) -> None:
        """A client goes, and perhaps the device side ends, before requests of the same iteration are launched."""

        async def work() -> None:
            for each in batched:
                with suppress(RequestError):
                    self._submit(each, 1, 0)
            if self.asked:
                self.lane.release(self.asked.pop(-1 - index % min(len(self.asked), len(batched))).slot)
            if ends:
                self.lane.fail_in_flight(LOST, ends == "lost")

        self.dead = self.dead or bool(ends)
        self._run(work())
        if ends:
            self.hand = Hand(links.attach(self._create(), self.memory))  # It answers nothing any more.
        self._turn()

    def _submit(self, batched: bool, rows: int, priority: int) -> None:
        slot = self.lane.take_slot()
        asked = Asked(slot, [])
        self.asked.append(asked)
        on_done = partial(self._on_end, asked)
        if batched:
            slot.lay_out(ROWS, [rows * 8])
            self.lane.submit(slot, "rows", ((rows, 2),), on_done, priority, batching=BATCHING)
        else:
            slot.reserve(rows)
            self.lane.submit(slot, "alone", SHAPES, on_done, priority)

    @precondition(lambda self: self.hand.tickets and not self.dead)
    @rule(failure=st.sampled_from([None, Failure("raised", "a bad row")]))
    def complete(self, failure: Failure | None) -> None:
        self._end_oldest(failure)
        self._turn()

    @precondition(lambda self: self.hand.tickets and not self.dead)
    @rule(lost=st.booleans())
    def complete_and_fail(self, lost: bool) -> None:
        """A completion arrives in the iteration in which the device side ends."""
        self._end_oldest(None)
        self._fail(lost)

    def _end_oldest(self, failure: Failure | None) -> None:
        ticket = self.hand.tickets[0]
        outputs = rows_out(ticket.shapes[0][0]) if ticket.model == "rows" and failure is None else ()
        self.hand.put(failure, outputs)

    @precondition(lambda self: self.asked)
    @rule(index=st.integers(0))
    def release(self, index: int) -> None:
        self.lane.release(self.asked.pop(index % len(self.asked)).slot)
        self._turn()

    @rule(queued=st.booleans())
    def fail_in_flight(self, queued: bool) -> None:
        self._fail(queued)

    def _fail(self, queued: bool) -> None:
        self.dead = True

        async def work() -> None:
            self.lane.fail_in_flight(LOST, queued)
            assert self.lane.statistics()[1:3] == (0, 0)
            if queued:
                assert all(each.ends for each in self.asked)
                assert self.lane.admission.suspended == LOST

        self._run(work())
        self.hand = Hand(links.attach(self._create(), self.memory))  # It answers nothing any more.
        self._turn()

    @rule()
    def accept(self) -> None:
        self.lane.suspend("")

    @precondition(lambda self: not self.relinking)
    @rule()
    def relink(self) -> None:
        self._begin_relink()
        self._turn()

    def _begin_relink(self) -> None:
        link, hand = self._attach(self._create())
        self.relinking = hand, self.loop.create_task(self.lane.relink(link))

    @invariant()
    def requests_end_once_and_none_is_lost(self) -> None:
        assert self.lane.statistics().in_flight <= IN_FLIGHT
        for each in self.asked:
            assert len(each.ends) <= 1
            for end in each.ends:
                assert isinstance(end, Done | Failed) or (isinstance(end, Unavailable) and str(end) == LOST)
            if not each.ends:
                pending = self.lane._pending[each.slot.index]
                assert pending.batch or self.scheduler.waits(each.slot.index) or each.slot.index in self._in_flight

    @invariant()
    def nothing_is_launched_while_the_device_side_is_gone_or_changes(self) -> None:
        if self.relinking:
            assert self.relinking[0].tickets == []
        if self.dead:
            assert self.lane.statistics().in_flight == 0

    @invariant()
    def slots_are_taken_by_requests_and_batches_only(self) -> None:
        batches = {id(pending.batch): pending.batch for pending in self.lane._pending.values() if pending.batch}
        running = self.lane._batches.running
        kept = {batch.slot.index for batch in [*batches.values(), *running.values()]}
        assert self.lane.slots.statistics().used == len(self.asked) + len(self.lane._abandoned) + len(kept)

    @invariant()
    def the_queue_keeps_its_order(self) -> None:
        queue = [entry[:2] for entry in self.scheduler._waiting]
        assert queue == sorted(queue)


class RunNowMachine(LaneMachine):
    """The same over a device side that runs some tickets at once, on the thread that submits them."""

    def __init__(self) -> None:
        self.willing = 0
        self.ran: set[int] = set()
        super().__init__()

    def _open(self, here: links.Link) -> None:
        here.tickets.run_now = partial(self._run_now, here)

    def _run_now(self, link: links.Link, ticket: Ticket) -> Done | None:
        assert link is self.lane._link
        assert not self.dead or self.relinking
        assert not self.scheduler.held
        assert ticket.serial not in self.ran
        assert ticket not in self.hand.tickets
        if not self.willing:
            return None
        self.willing -= 1
        self.ran.add(ticket.serial)
        return Done(ticket.slot, rows_out(ticket.shapes[0][0]) if ticket.model == "rows" else (), None, 1, 2)

    @rule(count=st.integers(0, 5))
    def run_now(self, count: int) -> None:
        """So many tickets run at once from now on."""
        self.willing = count


TestLaneMachine = LaneMachine.TestCase
TestLaneMachine.settings = settings(max_examples=60, stateful_step_count=30)
TestRunNowMachine = RunNowMachine.TestCase
TestRunNowMachine.settings = settings(max_examples=60, stateful_step_count=30)
