"""Checks that every partition runs on its own units: asks each one, and reports overlaps and units outside of the grant."""

from collections.abc import Iterable, Mapping
from itertools import combinations

from .base import Partition
from .errors import Misplaced

Placements = Mapping[str, frozenset[int]]


def locate(partitions: Mapping[str, Partition]) -> dict[str, frozenset[int]]:
    """Run a small amount of work in each partition and return the units it ran on, by name. Blocks."""
    return {name: partition.locate() for name, partition in partitions.items()}


def overlaps(placements: Placements) -> list[tuple[str, str, frozenset[int]]]:
    """Every pair of names that share units, with the units they share."""
    pairs = combinations(sorted(placements), 2)
    shared = ((a, b, placements[a] & placements[b]) for a, b in pairs)
    return [(a, b, units) for a, b, units in shared if units]


def check(partitions: Mapping[str, Partition], placements: Placements) -> None:
    """Raise Misplaced unless every partition ran on no more units than it was granted, and on none of another's."""
    problems: list[str] = []
    for name, partition in partitions.items():
        if (count := len(placements[name])) > partition.size:
            problems.append(f"{name} ran on {count} units ({_list(placements[name])}), but was granted {partition.size}")
    problems += [f"{a} and {b} both ran on {_list(units)}" for a, b, units in overlaps(placements)]
    if problems:
        raise Misplaced("; ".join(problems))


def _list(units: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(units)))
