"""Which of the host's cores HTTP runs on where the device sets none aside for its tenants: pure arithmetic.

A thread that hands work to a GPU waits for whoever else runs on its core, so HTTP keeps off the device process's cores,
and every tenant's off the others'. The lowest numbers go first: the device, the tenants, what is nobody's; the rest stays free.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partitions.plan import ranges

from ..config.tables import dotted

MOST = 2
"""Cores of one HTTP process: it is one thread of Python, and what the kernel does for it."""

TOO_FEW = "HTTP on any core: too few are left to give each process its own, so tenants' HTTP may delay others' work"
"""What to say where cores cannot be shared."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Core numbers: of the device's process, of each tenant's HTTP process, and of all others together; for people in `str`."""

    device: frozenset[int]
    fronts: Mapping[str, frozenset[int]]
    others: frozenset[int]

    def __str__(self) -> str:
        device, others = ranges(self.device), ranges(self.others)
        return f"{placed(self.fronts)}; the device's process on {device}, all others on {others}"


def share(allowed: Iterable[int], chosen: Mapping[str, Sequence[int] | None]) -> Shares | None:
    """Share the cores that this server may use; `chosen` are those that tenants were configured to have, if any.

    Half of what nobody chose is the device's, the other half the tenants', equally. None if that is not a core for each.
    """
    free = sorted(set(allowed).difference(*(cores or () for cores in chosen.values())))
    takers = [name for name, cores in chosen.items() if not cores]
    kept = len(free) // 2 if takers else len(free)
    device, rest = frozenset(free[:kept]), free[kept:]
    if not device or len(rest) < len(takers):
        return None
    each = min(MOST, len(rest) // max(1, len(takers)))
    given = {name: rest[place * each : (place + 1) * each] for place, name in enumerate(takers)}
    left = frozenset(rest[len(takers) * each :][:MOST])
    return Shares(device, {name: frozenset(cores or given[name]) for name, cores in chosen.items()}, left or device)


def placed(fronts: Mapping[str, Iterable[int]]) -> str:
    """On which cores tenants' HTTP runs, for people."""
    return f"HTTP {', '.join(f'of {name} on {ranges(cores)}' for name, cores in fronts.items())}"


def trespasses(chosen: Mapping[str, Sequence[int] | None], partitions: Mapping[str, Iterable[int]]) -> Iterator[str]:
    """Say which tenants' HTTP was configured to run on cores of others' partitions, a line for each such two."""
    for name, cores in chosen.items():
        for other, theirs in partitions.items():
            if name != other and (shared := set(cores or ()).intersection(theirs)):
                text = f"{ranges(shared)} is of {other}'s partition, whose work this tenant's HTTP would delay"
                yield f"{dotted(('tenants', name, 'front_cores'))}: {text}; leave it out, or name cores that are nobody's"
