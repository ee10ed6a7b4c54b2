"""What a lane remembers of a request until it was answered, and of requests that run together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import RequestError
from ..link.messages import Done, Ticket
from ..link.slots import Slot
from .batching import Batching, Queued

OnDone = Callable[[Done | RequestError], None]
"""Told how a request ended, once: its completion, or Failed, Unavailable, or DeadlineExceeded, the latter at the deadline."""


@dataclass(slots=True)
class PendingRequest:
    """A request whose inputs are in its slot; `ended` once nothing of it waits or runs, `heard` None once it was told.

    `patience` is until when it may wait for its turn, on the clock of `time.monotonic`, infinity for ever.
    """

    slot: Slot
    ticket: Ticket
    heard: OnDone | None
    timeout: float = math.inf  # In seconds.
    patience: float = math.inf
    ended: bool = False
    joint: "PendingBatch | None" = None

    def tell(self, end: Done | RequestError) -> None:
        """Tell the owner how it ended, unless it knows."""
        heard, self.heard = self.heard, None
        if heard:
            heard(end)


@dataclass(slots=True)
class PendingBatch:
    """Requests that run together, in a slot of their own; `left` are the slots of those that were not released yet."""

    slot: Slot
    ticket: Ticket
    batching: Batching
    members: Sequence[Queued]
    left: set[int]
    ended: bool = False
