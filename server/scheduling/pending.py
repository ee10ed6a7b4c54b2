"""What a lane remembers of a request until it was answered, of requests that run as one batch, and until when requests wait."""

import asyncio
import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import DeadlineExceeded, Failed, Outgrown, QueueFull, RequestError, Unavailable
from ..link.messages import Done, Failure, Ticket
from ..link.slots import Slot
from .batching import Queued
from .queue_policy import Batching

_RAISED = "the model raised: "
OnDone = Callable[[Done | RequestError], None]
"""Called once with the end of a request: its completion, Failed, Unavailable, or DeadlineExceeded once that has passed.

Of an answer in parts, it is called with each part too, and with Outgrown for a part that needs a larger block: before its end.
"""


class Canceller(Protocol):
    """What the lane asks of the device side besides running tickets."""

    def cancel(self, slot: int, serial: int) -> None:
        """Stop this ticket if that is possible, asynchronously; its completion still comes."""


class PendingRequest:
    """A request whose inputs are in its slot.

    `on_done` is None once it was called. `timeout` is in seconds; `queue_deadline` is until when it may be queued, on the clock
    of `time.monotonic`; both are infinity for no limit. `ended` is set when nothing of it is queued or runs any more. An answer
    in parts has a `ticket` for each part, of this `priority`, and is `paused` from a part's end to the next one's ticket.
    """

    __slots__ = ("batch", "ended", "on_done", "paused", "priority", "queue_deadline", "slot", "ticket", "timeout")

    # Not a dataclass, whose constructor stays Python when this is compiled.
    def __init__(self, slot: Slot, ticket: Ticket, on_done: OnDone | None, ended: bool = False) -> None:
        self.slot = slot
        self.ticket = ticket
        self.on_done = on_done
        self.timeout = self.queue_deadline = math.inf
        self.ended = ended
        self.batch: PendingBatch | None = None
        self.priority = 0
        self.paused = False

    def complete(self, end: Done | RequestError) -> None:
        """Call `on_done` with this, unless it was called before."""
        on_done, self.on_done = self.on_done, None
        if on_done:
            on_done(end)


@dataclass(slots=True)
class PendingBatch:
    """Requests that run as one batch, in an additional slot; `unreleased` are the slots of members not released yet."""

    slot: Slot
    ticket: Ticket
    batching: Batching
    members: Sequence[Queued]
    unreleased: set[int]
    ended: bool = False


def error_of(failure: Failure) -> RequestError:
    """The error that a request ends with for a failure of its work."""
    if failure.kind == "lost":
        return Unavailable(f"the device is lost: {failure.text}")
    if failure.kind == "stopped":
        return Unavailable(failure.text)
    if failure.kind == "overrun":
        return DeadlineExceeded(failure.text)
    if failure.kind == "outgrown":
        return Outgrown(int(failure.text))
    if failure.kind == "full":
        return QueueFull(failure.text)
    return Failed(f"{_RAISED}{failure.text}")


def failure_of(error: Exception) -> Failure:
    """The failure of which `error_of` makes this error again; of one that is unexpected, Unavailable."""
    if isinstance(error, Outgrown):
        return Failure("outgrown", str(error.nbytes))
    if isinstance(error, DeadlineExceeded):
        return Failure("overrun", str(error))
    if isinstance(error, QueueFull):
        return Failure("full", str(error))
    if isinstance(error, Failed):
        return Failure("raised", str(error).removeprefix(_RAISED))
    return Failure("stopped", str(error))


EARLY = 0.001
"""Seconds by which the timer may fire before a deadline: event loops count in whole milliseconds."""


class Deadlines:
    """Those of waiting requests, with a callback each. Belongs to the event loop. Deadlines are in seconds on the clock of
    `time.monotonic`; each has a unique number.

    Timers fire only between two iterations of the event loop, and one iteration may serve many connections. So expired
    deadlines are also checked (`fire_due`) before each request and each completion is handled: a 504 is late by at most one
    request's handling.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._next = self._set_for = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._firing = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, deadline: float, number: int, callback: Callable[[], None]) -> None:
        """Call this once, at this time."""
        insort(self._waiting, (deadline, number, callback))
        self._set_timer()

    def remove(self, deadline: float, number: int) -> None:
        """Do not call this one any more; does nothing if it was called already."""
        index = bisect_left(self._waiting, (deadline, number))
        if self._waiting[index : index + 1] and self._waiting[index][1] == number:
            del self._waiting[index]
            self._next = self._waiting[0][0] if self._waiting else math.inf  # The timer may fire once for nothing.

    def fire_due(self) -> None:
        """Call all callbacks whose deadline has passed; if there are none this costs one comparison."""
        if self._next < math.inf and time.monotonic() >= self._next:
            self._fire(time.monotonic())

    def close(self) -> None:
        """Remove all deadlines."""
        self._waiting.clear()
        self._next = math.inf
        self._cancel()

    def _on_timer(self) -> None:
        self._timer, self._set_for = None, math.inf
        self._fire(time.monotonic() + EARLY)

    def _fire(self, until: float) -> None:
        """A callback may call `fire_due` itself: then the loop that called it goes on with the rest."""
        if self._firing:
            return
        self._firing = True
        try:
            while self._waiting and self._waiting[0][0] <= until:
                _, _, callback = self._waiting.pop(0)
                callback()
        finally:
            self._firing = False
            self._set_timer()

    def _set_timer(self) -> None:
        self._next = self._waiting[0][0] if self._waiting else math.inf
        if self._next < self._set_for:
            self._cancel()
            self._set_for = self._next
            self._timer = asyncio.get_running_loop().call_later(self._next - time.monotonic(), self._on_timer)

    def _cancel(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer, self._set_for = None, math.inf
