"""Which of a worker's tickets are cancelled, and what requests that are cancelled or fail are answered."""

import time

from engines import Cancelled, OutputsTooLarge
from partitions import DeviceLost

from ..errors import Outgrown, Unavailable
from ..link.messages import Failure, Ticket

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
