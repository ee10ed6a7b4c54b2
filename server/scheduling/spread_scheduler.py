"""The scheduler of a tenant on several devices: as many works in flight as its devices together have places for."""

from .batching import NOTHING, Choice, choose
from .scheduler import Scheduler


class SpreadScheduler(Scheduler):
    """As `Scheduler`; `in_flight_limit` and `horizon` are for each of so many devices.

    Which of them gets a ticket is decided when it is put (`server.link.spread`).
    """

    def __init__(self, limit: int, in_flight_limit: int, horizon: int, setting: str, devices: int) -> None:
        super().__init__(limit, in_flight_limit * devices, horizon * devices, setting)
        self.devices = devices
        self._of_each = in_flight_limit, horizon

    def set_devices(self, count: int) -> None:
        """So many devices get tickets from now on. With none the limits stay as for one."""
        in_flight_limit, horizon = self._of_each
        self.devices = max(1, count)
        self.in_flight_limit, self.horizon = in_flight_limit * self.devices, horizon * self.devices
        self._current_limit = max(self.in_flight_limit, self.horizon // self._longest)

    def choose(self, now: float) -> Choice:
        running = self._running
        if self.held or not self._waiting or running >= self._current_limit:
            return NOTHING
        alone = self.on_host_cores or self._current_limit > self.in_flight_limit
        return choose(self._waiting, running, self.devices if alone else self.in_flight_limit, now, self.devices)
