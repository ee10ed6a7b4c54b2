"""The scheduler of a helper: requests go on to the lead's queue at once, and are refused early while that is full."""

from ..errors import QueueFull
from ..link.occupancy import Occupancy
from .scheduler import Scheduler


class HelperScheduler(Scheduler):
    """As `Scheduler`, for so many slots. The lead decides what fits into the queue; `limit` and `setting` are its."""

    def __init__(self, slots: int, limit: int, setting: str, occupancy: Occupancy) -> None:
        super().__init__(limit, slots, setting=setting)
        self._occupancy = occupancy

    @property
    def full(self) -> bool:
        return self._occupancy.queue_is_full

    def check(self) -> None:
        if self.full:
            raise QueueFull(f"Exceeds maximum queue size: {self.limit} requests may wait, and as many do ({self.setting})")
