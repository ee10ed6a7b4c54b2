"""Who is let into a tenant's queue: its limits, and the counts of what was refused."""

import time

from ..errors import DeadlineExceeded, LimitExceeded, QueueFull, Unavailable
from ..link.messages import ModelKey
from .lender import ENDED as ENDED
from .lender import Neighbour
from .limits import LIMITS, RateLimits
from .pending import Deadlines
from .scheduler import Scheduler


class Admission:
    """Belongs to the event loop of its lane. Refuses by raising, and counts what it refused.

    `refusing` is the reason why new requests are refused, "" if they are not; `suspended` is the part of it that is temporary.
    `neighbour` is set if others have to know when the tenant has requests: one that is admitted is open there until it
    `leave`s. `limits` are set if the tenant's rate is limited. `rejected`, `expired`, `invalid` and `unread` are counts, as is
    `limited` by limit.
    """

    def __init__(self, scheduler: Scheduler, deadlines: Deadlines) -> None:
        self.refusing = self.suspended = ""
        self.neighbour: Neighbour | None = None
        self.limits: RateLimits | None = None
        self.rejected = self.expired = self.invalid = self.unread = 0
        self.limited = dict.fromkeys(LIMITS, 0)
        self._scheduler = scheduler
        self._deadlines = deadlines

    def admit(self, nbytes: int = 0, charged: bool = False) -> int:
        """Admit an inference, if possible before its body of so many bytes is read: called once for each, to charge the limits.

        Further ones of a request that takes several are `charged` already, and refused only while the lane is suspended.

        Reserves nothing: the queue can fill up while the body arrives, which `take_slot` checks. Returns what
        `leave` has to be called with; ENDED if it need not be. Raises as `check_room` does, and as `RateLimits.charge`.
        """
        self.check_room(charged, charged)
        if self.limits is not None and not charged:
            self.charge(1, nbytes)
        return self.neighbour.begin() if self.neighbour is not None else ENDED

    def leave(self, visit: int, model: ModelKey, latency: int) -> None:
        """An admitted request is open no more; `latency` is as for `Neighbour.end`."""
        if self.neighbour is not None:
            self.neighbour.end(visit, model, latency)

    def close(self) -> None:
        """No request will come any more."""
        if self.neighbour is not None:
            self.neighbour.close()

    def check_room(self, begun: bool = False, retried: bool = False) -> None:
        """Raise Unavailable while the lane refuses requests, or QueueFull if there is no room for one more; charges nothing.

        One of several inferences of a request that has `begun` is refused only while the lane is suspended. One that is
        `retried` until there is room is not counted. Expired deadlines fire first, since they make room.
        """
        self._deadlines.fire_due()
        if self.refusing and (self.suspended or not begun):
            raise Unavailable(self.refusing)
        try:
            self._scheduler.check()
        except QueueFull:
            self.rejected += not retried
            raise

    def charge(self, requests: int, nbytes: int) -> None:
        """Charge the limits, if there are any; `admit` does that for a request whose length is known. Raises as it does."""
        if self.limits is not None:
            try:
                self.limits.charge(requests, nbytes, time.monotonic_ns() // 1000)
            except LimitExceeded as error:
                self.count_limited(error)
                raise

    def check_limits(self) -> None:
        """Raise LimitExceeded if `admit` would raise it for any request now; charges nothing."""
        if self.limits is not None:
            try:
                self.limits.check(time.monotonic_ns() // 1000)
            except LimitExceeded as error:
                self.count_limited(error)
                raise

    def suspend(self, reason: str) -> None:
        """Refuse new requests for this reason; with "" accept them again, unless `refusing` was set for good."""
        if self.refusing == self.suspended:
            self.refusing = reason
        self.suspended = reason

    def reject(self, text: str) -> QueueFull:
        """Count a request that there is no room for; returns the error for it."""
        self.rejected += 1
        return QueueFull(text)

    def expire(self, timeout: float) -> DeadlineExceeded:
        """Count a request that timed out after so many seconds; returns the error for it."""
        self.expired += 1
        return expired(timeout)

    def count_limited(self, error: LimitExceeded) -> None:
        """Count a refusal for one of the tenant's limits."""
        self.limited[error.limit] += 1

    def count_invalid(self) -> None:
        """Count an invalid request, such as one that is not JSON; it is no failure of its model."""
        self.invalid += 1

    def count_unread(self) -> None:
        """Count a connection that was closed because its client did not read its answer."""
        self.unread += 1


def expired(timeout: float) -> DeadlineExceeded:
    """The error for a request that timed out after so many seconds."""
    return DeadlineExceeded(f"Request timeout expired: {timeout * 1e6:.0f} microseconds (parameters.timeout) passed")
