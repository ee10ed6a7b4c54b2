"""The curve of one model: the shares to measure, what was found, and what follows from it."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from partitions import Device

from .measure import Bind, Effort, measure, requests_at, seconds_for
from .options import Share, Target
from .points import LEAST, Point, best, doubling, knee, smallest


class Impossible(Exception):
    """What was asked for cannot be: a sentence with the numbers."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A model in requests of `batch` rows on shares of a device, in ascending order; `notes` are sentences about the shares."""

    model: str
    batch: int
    device: str
    unit: str
    total: int
    points: tuple[Point, ...]
    target: Target | None = None
    notes: tuple[str, ...] = ()
    machine: dict[str, str] = field(default_factory=dict)

    @property
    def knee(self) -> Point | None:
        """See `points.knee`."""
        return knee(self.points)

    @property
    def smallest(self) -> Point | None:
        """See `points.smallest`."""
        return smallest(self.points)

    @property
    def best(self) -> Point | None:
        """See `points.best`."""
        return best(self.points)


def shares(asked: Sequence[Share], device: Device) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The granules of each share, ascending, and a sentence for each that was rounded. Raises Impossible."""
    sizes, unit = device.granules, device.unit
    if not asked:
        return doubling(len(sizes)), ()
    sizes_up_to = list(accumulate(sizes))
    found: set[int] = set()
    notes = []
    for share in asked:
        there, what = (len(sizes), "granules") if share.in_granules else (sizes_up_to[-1], f"{unit}s")
        if share.number > there:
            raise Impossible(f"--shares: {share.number} {what}, but the device has {there}")
        granules = share.number if share.in_granules else 1 + bisect_left(sizes_up_to, share.number)
        size = sizes_up_to[granules - 1]
        if not share.in_granules and size != share.number:
            notes.append(f"{share.number} {unit}s were rounded to {size}: shares are whole granules of {sizes[0]} {unit}s")
        found.add(granules)
    return tuple(sorted(found)), tuple(notes)


def check_seconds(target: Target, seconds: float, whose: str = "") -> None:
    """Raise Impossible if so many seconds have too few requests for a p99 at the target's rate."""
    if target.p99 and (count := requests_at(target.rate, seconds)) < LEAST:
        enough = seconds_for(LEAST, target.rate)
        raise Impossible(
            f"{whose}{target.rate:g} requests a second are {count} in four fifths of --seconds {seconds:g} (the other fifth is "
            f"for requests back to back and alone): too few for a p99, which takes {LEAST}; give --seconds {enough}"
        )


def points(
    device: Device, granules: Sequence[int], bind: Bind, target: Target | None, effort: Effort, report: Callable[[Point], None]
) -> Iterator[Point]:
    """Measure each share; `report` is called with each point as it is found. Blocks."""
    for count in granules:
        found = measure(device, count, bind, [1.0], target, effort)
        report(found)
        yield found
