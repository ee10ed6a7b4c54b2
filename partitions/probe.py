"""Checks that every partition runs on its own units: asks each one, and reports overlaps and units outside of the grant."""

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations

from .base import Held, Partition
from .errors import Misplaced

NONE: frozenset[int] = frozenset()


Placement = frozenset[int] | Held
"""The units on which a partition's work ran, or, where these have no numbers, when it had all of them."""
Placements = Mapping[str, Placement]


def locate(partitions: Mapping[str, Partition]) -> dict[str, frozenset[int]]:
    """Run a small amount of work in each partition and return the units it ran on, by name. Blocks."""
    return {name: partition.locate() for name, partition in partitions.items()}


Overlap = tuple[str, str, frozenset[int]]
"""Two partitions by their names, and the units that they share."""


def overlaps(*looks: Placements, apart: Collection[str] = ()) -> list[Overlap]:
    """Every pair of names that shared units in each of some looks at the same partitions, with the units of the last look.

    A pair of which both are in `apart` is left out: an earlier look has shown that the two share no units. Of a pair that was
    held no units are named; one moment at which both were filled shows that they share none. Without such a moment one of them
    may only have begun too late, so hold the two again.
    """
    found = []
    for a, b in combinations(sorted({name for look in looks for name in look}), 2):
        if a in apart and b in apart:
            continue
        shared = [_shared(look[a], look[b]) for look in looks if a in look and b in look]
        if shared and None not in shared:
            found.append((a, b, shared[-1] or NONE))
    return found


def scattered(placements: Placements) -> set[str]:
    """The held partitions of which no moment had all units filled: a longer hold is needed to judge them."""
    return {name for name, each in placements.items() if isinstance(each, Held) and each.until <= each.since}


def check(partitions: Mapping[str, Partition], placements: Placements) -> None:
    """Raise Misplaced unless every partition ran on no more units than it was granted, and on none of another's."""
    problems: list[str] = []
    for name, partition in partitions.items():
        placement = placements[name]
        if isinstance(placement, frozenset) and (count := len(placement)) > partition.size:
            problems.append(f"{name} ran on {count} units ({_list(placement)}), but was granted {partition.size}")
    if problems := [*problems, *map(explained, overlaps(placements))]:
        raise Misplaced("; ".join(problems))


def explained(overlap: Overlap) -> str:
    """One of `overlaps` in words."""
    a, b, units = overlap
    if units:
        return f"{a} and {b} both ran on {_list(units)}"
    return f"{a} and {b} did not have all their units at the same time, so they share some, or the host was too busy"


def _shared(a: Placement, b: Placement) -> frozenset[int] | None:
    """The units that both have; none are named if they were held, and not at the same time. None if they are apart."""
    if isinstance(a, Held) and isinstance(b, Held):
        return None if max(a.since, b.since) < min(a.until, b.until) else NONE
    if isinstance(a, Held) or isinstance(b, Held):
        raise TypeError("units and times cannot be compared; locate all, or hold all")
    return a & b or None


def _list(units: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(units)))
