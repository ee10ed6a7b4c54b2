"""One strain of a tenant: its passes obey the tenant's fence as works of its models do, and are counted as works of its own."""

from collections.abc import Callable
from contextlib import suppress
from time import monotonic, monotonic_ns, sleep

from partitions import Partition
from partitions.strain import Strain

from ..accounts.meter import Meter, Place
from ..launch_loop.structures import IN, MEMORY, OUT
from .worker import Worker

STRAIN = "strain"
"""What stands in accounts for a model's name; the kind stands for its version."""
_PATHS = {"PCIe in": IN, "PCIe out": OUT}


class _Over(Exception):
    """There is no time left for another pass."""


class Straining:
    """`before` and `finish` are called on the thread of the strain. `worker` returns the tenant's current worker."""

    def __init__(
        self, kind: Strain, seconds: float, home: Partition, worker: Callable[[], Worker | None], meter: Meter
    ) -> None:
        self._kind = kind
        self._seconds = seconds
        self._until: float | None = None
        """When the strain ends at the latest, as it began before the first pass."""
        self._home = home
        self._worker = worker
        self._meter = meter
        self._place: Partition | None = None
        """Where the last pass runs; None before the first."""
        self._began = 0

    def before(self, nbytes: int) -> Partition | None:
        """Where the next pass runs: on the narrow placement while neighbours are at work, if there is one; over PCIe at home,
        held back, if the tenant has a share of that. What the share is of is paid for first. Blocks until then.
        """
        self.finish()
        self._until = self._until or monotonic() + self._seconds
        worker = self._worker()
        pace, narrow = (worker.pace, worker.narrow) if worker else (None, None)  # Each may be taken away meanwhile.
        held, path = None, _PATHS.get(self._kind, MEMORY)
        if path != MEMORY:
            held = self._home if pace and pace.rate(path) and pace.applies() else None
        elif narrow and narrow.applies():
            held = narrow.partition
        if held and pace and self._kind != "L2":
            with suppress(_Over):
                pace.pay(nbytes, path, self._pause)
        self._place, self._began = held or self._home, monotonic_ns()
        return held

    def _pause(self, seconds: float) -> None:
        assert self._until
        if (left := self._until - monotonic()) <= 0:
            raise _Over
        sleep(min(seconds, left))

    def finish(self) -> None:
        """The last pass has ended, or the next one begins, which takes its place."""
        if self._place:
            counter = self._meter.counter(f"{STRAIN}/{self._kind}", Place(self._place.size))
            counter.add(monotonic_ns() - self._began)
            self._place = None
