"""Counts what a worker's works take, in its tenant's meter."""

from collections.abc import Iterable
from typing import Any

from ..accounts.meter import Counter, Meter, Place
from ..launch_loop.loop import Twin
from ..link.messages import ModelKey
from .placement import SidePlacement
from .session import InFlight


class Metering:
    """Of one worker, on a partition of its own; the threads that enqueue and wait for works call it, in turn.

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
