"""What a lane counts."""

from typing import NamedTuple


class LaneStatistics(NamedTuple):
    """Requests queued now, in flight, and running although their clients disconnected; and counted since the start: refused for
    lack of room, timed out, and invalid.
    """

    waiting: int
    in_flight: int
    abandoned: int
    rejected: int
    expired: int = 0
    invalid: int = 0
