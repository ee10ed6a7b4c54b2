"""What a worker's threads share: the link that they serve, which of them waits, what is cancelled, and what works take."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Lock, Semaphore
from typing import Any, NamedTuple

from engines import Cancelled, OutputsTooLarge, Room, Tensor, Work
from partitions import DeviceLost
from partitions.base import Closing

from ..accounts.meter import Counter, Meter, Place
from ..errors import Outgrown, Unavailable
from ..launch_loop.loop import Broken, LaunchLoop, Twin
from ..link.messages import Failure, ModelKey, Ticket
from ..link.ring import Link
from .deferred import DeferredTickets
from .gil_priority import GilPriority
from .placement import SidePlacement


class Endpoint(NamedTuple):
    """The device side's end of a tenant: its link, and the handle that keeps its tensor memory page-locked for the device."""

    link: Link
    pinned: Closing


class Unfinished(NamedTuple):
    """An answer between two parts: the serial of the last part's ticket, and its work.

    `stored` is False if the part was larger than its slot: it waits for the next ticket, which brings a larger block.
    """

    serial: int
    work: Work
    stored: bool


class InFlight:
    """A ticket whose work was enqueued and has not ended.

    `launched` is when it began to be enqueued, in nanoseconds: a library may do much of a work meanwhile, as it copies weights
    that are streamed. `counter` is what its time is added to, None if the device adds it up.
    `placement` is where it runs, with `executor`, if that is not at home, else None.
    """

    __slots__ = ("counter", "executor", "launched", "placement", "room", "ticket", "work")

    # Not a dataclass, whose constructor stays Python when this is compiled.
    def __init__(self, ticket: Ticket, work: Work, room: Room, launched: int = 0, counter: Counter | None = None) -> None:
        self.ticket = ticket
        self.work = work
        self.room = room
        self.launched = launched
        self.counter = counter
        self.placement: SidePlacement | None = None
        self.executor: Any = None


class Session:
    """What the threads of a worker share from `Worker.serve` to `Worker.halt`.

    The thread that holds `enqueuing` takes tickets and enqueues them, to `flights`; the one that holds `reporting` writes
    completions; and one waits for the works in `flights`, as `roles` decides.
    """

    def __init__(
        self, endpoint: Endpoint, priority: GilPriority, parking: Semaphore | None, loop: LaunchLoop | None = None
    ) -> None:
        tickets, completions = endpoint.link.tickets, endpoint.link.completions
        wake = loop.wake if loop else tickets.wake
        self.link = endpoint.link
        self.priority = priority
        self.loop = loop
        self.answered_wakes = 0
        """The `wakes` of the launch loop that a thread has seen to since."""
        self.roles = ThreadRoles(parking, wake)
        self.deferred = DeferredTickets(completions.report_deferred, wake)
        self.flights: deque[InFlight] = deque()
        self.unfinished: dict[int, Unfinished] = tickets.unfinished
        """By slot, the answers that go on with their next ticket. The link's: the next worker goes on with them."""
        self.enqueuing = Lock()
        self.reporting = Lock()
        self.ended: Future[None] = Future()
        """Done when the last thread ends: nothing is in flight any more."""
        self.ended.set_running_or_notify_cancel()  # So that nothing that awaits it can cancel it.
        self.error: Exception | None = None
        """Why the threads ended, if one of them failed."""

    @property
    def has_work(self) -> bool:
        """Whether tickets wait, or the launch loop has works in flight. Any thread."""
        idle = self.loop.idle if self.loop else None
        return self.link.tickets.waiting() if idle is None else not idle

    def listen(self, in_flight: bool, abandoned: bool, paced: int = 0) -> int | Broken:
        """Block until this thread has tickets to start. Returns their number, which may be 0, or what the launch loop returns.

        `paced`: for how many nanoseconds the next ticket waits for the tenant's shares, then this returns as well. If
        nothing is in flight, the launch loop runs the tickets that it knows meanwhile, on this thread and without the GIL.
        Only one thread may listen then. `abandoned`: all tickets are to fail.
        """
        loop, tickets = self.loop, self.link.tickets
        if paced:
            return tickets.listen(paced / 1e9)
        if loop is None or in_flight:
            return tickets.listen()
        if loop.left_one or not loop.knows_any or self.deferred.ready or abandoned:
            # Some have been announced already if they were left to the loop, and it has forgotten them.
            return 0 if tickets.hand_over()[1] > 0 else tickets.listen()
        if not self.roles.alone:
            self.roles.expect(False)  # This thread is parked next, and the other one comes here once it listens no more.
            tickets.wake()
            return 0
        self.priority.start_waiting(True)
        broken = loop.run(self.answered_wakes)
        self.priority.start_waiting(False)
        return broken or 0

    def wake_listener(self, in_flight: bool) -> None:
        """Called before the calling thread is parked: if nothing is in flight any more and tickets are left to the launch loop,
        the other thread may listen for none, as it saw works in flight when it began.
        """
        if self.loop and not in_flight and self.link.tickets.hand_over()[1] > 0:
            self.link.tickets.wake()

    def is_left_to_loop(self, look: bool, abandoned: bool) -> bool:
        """Whether the next ticket is for the launch loop, once nothing else is in flight. `look` is as for `Tickets.poll`.

        While deferred tickets are ready, the worker takes all tickets, so that none waits until all of those have ended.
        """
        return self.loop is not None and not (self.deferred.ready or abandoned) and self.loop.takes_next(look)

    def enqueue(self, executor: Any, ticket: Ticket) -> InFlight:
        """Put the work of a ticket on the partition's stream. Raises what the executor raises."""
        slot = self.link.arena.slot(ticket.slot)
        slot.use_block(ticket.start, ticket.capacity)
        inputs, room = slot.inputs(executor.engine.signature, ticket.shapes, ticket.capacity)
        if ticket.unasked:
            room = Room(room.address, room.nbytes, ticket.unasked)
        began = time.monotonic_ns()
        work = executor.enqueue(inputs, room) if not ticket.after else self.enqueue_part(ticket, executor, inputs)
        return InFlight(ticket, work, room, began)

    def enqueue_beside(self, placement: SidePlacement, executor: Any, ticket: Ticket) -> InFlight:
        """The same on the stream of a placement beside the home, whose `begin` has just returned True."""
        try:
            flight = self.enqueue(executor, ticket)
        except BaseException:
            placement.give_up()
            raise
        flight.placement, flight.executor = placement, executor
        return flight

    def enqueue_part(self, ticket: Ticket, executor: Any, inputs: Sequence[Tensor]) -> Work:
        """Begin an answer in parts, or go on with one. Raises Unavailable if it was begun on another link.

        Parts get no room: one that turns out to be larger than its slot must outlive the slot's block.
        """
        last = self.unfinished.pop(ticket.slot, None)
        work: Work
        if ticket.after == ticket.serial:
            work = executor.enqueue(inputs)
        elif last is None or last.serial != ticket.after:
            raise Unavailable("the answer cannot go on: the worker that had begun it has ended; send the request again")
        else:
            work = executor.proceed(last.work) if last.stored else last.work
        return work

    def keep(self, flight: InFlight, stored: bool) -> None:
        """Keep an answer, of which a part has ended, until its next ticket comes; `stored` is as in `Unfinished`."""
        self.unfinished[flight.ticket.slot] = Unfinished(flight.ticket.serial, flight.work, stored)


class ThreadRoles:
    """What the one or two threads of a worker do: one waits for the oldest work while the other listens for tickets. They call
    the methods, unless a method says otherwise.

    Leader/followers without a handover: each idle thread is blocked in `Tickets.listen`, and the kernel wakes one of them when
    tickets arrive. That thread enqueues them, then waits for works unless the other thread does. So no inference has to wait
    until one thread has woken the other. If works end sooner than a thread can be woken, the second thread costs more than it
    gains. While works are that short one of the two is parked, and the other polls for tickets between two waits.

    The second of two threads is parked behind `parking` at first, before it calls anything; with None there is one thread.
    `wake` makes one listening thread return. `stopped`: the threads should end once nothing is in flight. One that is parked by
    then has no part in that, and ends once `parking` is released. `alone`: the thread that waits for works has to poll for
    tickets, as no other thread listens. `long`: the current or last work is a long one.
    """

    def __init__(self, parking: Semaphore | None, wake: Callable[[], None]) -> None:
        self.stopped = self.long = False
        self.alone = True
        self._wake = wake
        self._changing = Lock()
        self._parking = parking or Semaphore(0)
        self._threads = 1 if parking is None else 2
        self._parked = parking is not None
        self._left = 0
        """Threads that were parked when all were to end."""
        self._waiting = Lock()

    def __repr__(self) -> str:
        state = "stopped" if self.stopped else "one waits" if self._waiting.locked() else "none waits"
        return f"<ThreadRoles of {self._threads} threads, {state}{', one is parked' if self._parked else ''}>"

    def listens(self, timed: bool = False) -> bool:
        """Called by an idle thread: whether it should listen for tickets, or end. Blocks while the thread is parked, which is
        not if it is `timed`: the other one may listen for longer.
        """
        if not self.long and not self.alone and not timed:
            self._park()
        return not self.stopped

    def waits(self) -> bool:
        """Whether the calling thread should wait for works until it calls `done`; False if the other thread does."""
        return self._waiting.acquire(blocking=False)

    def done(self) -> None:
        """The calling thread has stopped waiting for works. It must check again whether anything was enqueued meanwhile."""
        self._waiting.release()

    def expect(self, long: bool) -> None:
        """Set whether the next work is a long one. For the thread that waits for works, before it blocks."""
        if long == self.long:
            return
        with self._changing:
            self.long = long
            if long:
                self._unpark()

    def stop(self) -> None:
        """Make all threads end once nothing is in flight; one that is parked stays so. Any thread."""
        with self._changing:
            self.stopped = True
            self._left = int(self._parked)
        self._wake()

    def end(self) -> bool:
        """The calling thread ends, after `stop`; returns whether it was the last that is not parked."""
        with self._changing:
            self._threads -= 1
            self.alone = True
            last = self._threads == self._left
        if self._threads > self._left:
            self._wake()  # The other may still be listening.
        return last

    def _park(self) -> None:
        with self._changing:
            if self.long or self.alone or self.stopped:
                return
            self._parked = self.alone = True
        self._parking.acquire()

    def _unpark(self) -> None:
        """Call with `_changing` held."""
        if self._parked and not self.stopped:
            self._parked = self.alone = False
            self._parking.release()


WITHDRAWN = Failure("cancelled", "withdrawn before it began")
"""For tickets that are not started because their requests were released."""
EXPIRED = Failure("expired", "Request timeout expired before it began")
"""For tickets that are not started because their deadline has passed."""


class Cancellations:
    """Any thread sets an attribute, in one step; the worker's threads read them.

    `by_slot` has the serial of the ticket that was last cancelled in each slot. `abandoned` is set if all tickets are
    cancelled, `overrun` if one work, of this serial, ran for too long; each has the failure to report.
    """

    def __init__(self) -> None:
        self.by_slot: dict[int, int] = {}
        self.abandoned: Failure | None = None
        self.overrun: tuple[int, Failure] | None = None

    def covers(self, ticket: Ticket) -> bool:
        """Whether this ticket is cancelled."""
        return self.abandoned is not None or self.by_slot.get(ticket.slot) == ticket.serial

    def refusal(self, ticket: Ticket) -> Failure | None:
        """Why a ticket must not be started: it is cancelled, or its deadline has passed."""
        if self.covers(ticket):
            return self.abandoned or WITHDRAWN
        if time.monotonic() > ticket.deadline:
            return EXPIRED
        return None

    def is_refused(self, ticket: Ticket) -> bool:
        return self.refusal(ticket) is not None

    def reason(self, ticket: Ticket, error: Exception) -> Failure | None:
        """Why the work of a ticket was cancelled, if not by its client."""
        if not isinstance(error, Cancelled):
            return None
        if self.overrun and self.overrun[0] == ticket.serial:
            return self.overrun[1]
        return self.abandoned if self.abandoned is not WITHDRAWN else None


def failure_of(error: Exception) -> Failure:
    """What to report for an error of a work."""
    text = str(error) or type(error).__name__
    if isinstance(error, DeviceLost):
        return Failure("lost", text)
    if isinstance(error, Outgrown | OutputsTooLarge):
        return Failure("outgrown", str(error.nbytes))
    if isinstance(error, Unavailable):
        return Failure("stopped", text)
    return Failure("cancelled" if isinstance(error, Cancelled) else "raised", text)


class Metering:
    """Counts in the tenant's meter what works take. Of one worker, on a partition of its own; the threads that enqueue and wait
    for works call it, in turn.

    `hosted`: a work begins when a thread waits for it; otherwise when it is launched, or when the work before it ends.
    """

    def __init__(self, meter: Meter, home: Place, hosted: bool) -> None:
        self._meter = meter
        self._home = home
        self._hosted = hosted
        self._counters: dict[tuple[ModelKey, Place], tuple[Any, Counter | None]] = {}
        self._since = self._last_end = 0

    def counter(self, executor: Any, model: ModelKey, place: Place | None = None) -> Counter | None:
        """Where the works of an executor are counted, at home or as this place; None if the device adds up what they take."""
        place = place or self._home
        found = self._counters.get((model, place))
        if found is None or found[0] is not executor:
            found = self._counters[model, place] = executor, self._find(executor, model, place)
        return found[1]

    def twin(self, placement: SidePlacement | None, model: ModelKey) -> Twin | None:
        """What runs a model's works on another placement than the home, for the launch loop; None if nothing does."""
        if placement is None or (executor := placement.executors.get(model)) is None:
            return None
        return Twin(executor, self.counter(executor, model, placement.place), placement.demand(model))

    def forget(self, models: Iterable[ModelKey]) -> None:
        """These models have left: keep their executors no longer. Nothing of them is in flight. Any thread."""
        gone = frozenset(models)
        for key in [key for key in list(self._counters) if key[0] in gone]:
            self._counters.pop(key, None)

    def begin(self, flight: InFlight, now: int) -> None:
        """A thread begins to wait for the oldest work."""
        self._since = now if self._hosted else max(flight.launched, self._last_end)

    def end(self, flight: InFlight, ended: int, most: int) -> None:
        """That work has ended, or failed. It has run for at most so many nanoseconds, if that is known, else less than 0."""
        self._last_end = ended
        if flight.counter is not None:
            took = ended - self._since
            flight.counter.add(took if most < 0 or took < most else most)

    def _find(self, executor: Any, model: ModelKey, place: Place) -> Counter | None:
        counter = self._meter.counter(model, place)
        time = getattr(executor, "device_time", None)
        if time is None:
            return counter
        if time not in counter.device_times:
            counter.device_times.append(time)
        return None
