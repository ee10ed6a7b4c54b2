"""What a lane counts, and its slots."""

from typing import NamedTuple


class LaneStatistics(NamedTuple):
    """Requests queued now, in flight, and running although their clients disconnected; and counted since the start: refused for
    lack of room, timed out, invalid, and refused for each of the tenant's limits, in the order of `limits.LIMITS`; connections
    closed because their clients did not read their answers; and the nanoseconds that works ran, answered or not.
    """

    waiting: int
    in_flight: int
    abandoned: int
    rejected: int
    expired: int = 0
    invalid: int = 0
    limited: tuple[int, int, int, int] = (0, 0, 0, 0)
    unread: int = 0
    ran: int = 0


class SlotStatistics(NamedTuple):
    """Slots in use, slots used at least once so far, and the bytes of the tenant's memory that slots hold.

    Those in use are without those that relay a request of another process, which counts it.
    """

    used: int
    slots: int
    nbytes: int
