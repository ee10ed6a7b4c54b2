"""Which of the host's cores HTTP runs on, where devices set none aside for their tenants. Pure arithmetic.

A thread that hands work to a GPU waits for every other thread that runs on its core. So HTTP processes stay off the cores of
the device processes, and each tenant's off the other tenants'. Cores are given out from the lowest number on: to the device
processes, to the tenants, to the dispatcher and the HTTP processes without a tenant; the rest stays free.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType

from partitions.plan import ranges

from ...config.tables import dotted

MAX_CORES = 2
"""Cores for one HTTP process: one Python thread, and the kernel's work on its behalf."""

TOO_FEW_CORES = "HTTP on any core: too few are left to give each process its own, so tenants' HTTP may delay others' work"
"""The warning where cores cannot be shared out."""


@dataclass(frozen=True, slots=True)
class Affinity:
    """Core numbers of each device process, of each tenant's HTTP process, and of all other processes together.

    `str` describes it for the log.
    """

    devices: Mapping[str, frozenset[int]]
    tenants: Mapping[str, frozenset[int]]
    others: frozenset[int]

    def builds(self, device: str) -> frozenset[int]:
        """For the children of this device process: cores that are left over, or else its own."""
        own = self.devices[device]
        return own if own <= self.others else self.others

    def __str__(self) -> str:
        several = len(self.devices) > 1
        devices = ", ".join(f"{f'of {name} ' * several}on {_cores(cores)}" for name, cores in self.devices.items())
        processes = f"device process{'es' * several} {devices}"
        return f"{describe(self.tenants)}; {processes}, all others on {_cores(self.others)}"


def share_cores(
    allowed: Iterable[int],
    configured: Mapping[str, Sequence[int] | None],
    devices: Sequence[str] = ("0",),
    processes: Mapping[str, int] = MappingProxyType({}),
) -> Affinity | None:
    """Share out the cores that this server may use; `configured` holds each tenant's `front_cores`, if it has any.

    Of the cores that are in no tenant's configuration, half are for the processes of these devices and the other half for the
    tenants, in equal numbers for each HTTP process; `processes` are the tenants with several. Where there are too few for that,
    every tenant has as many as every other. None if that leaves less than one core for each.
    """
    free = sorted(set(allowed).difference(*(cores or () for cores in configured.values())))
    takers = [name for name, cores in configured.items() if not cores]
    kept = len(free) // 2 if takers else len(free)
    rest, share = free[kept:], kept // len(devices)
    if not share or len(rest) < len(takers):
        return None
    last = len(devices) - 1  # It has what cannot be divided.
    own = {name: free[at * share : (at + 1) * share if at < last else kept] for at, name in enumerate(devices)}
    counts = [processes.get(name, 1) for name in takers]
    if sum(counts) > len(rest):
        counts = [1] * len(takers)
    each = min(MAX_CORES, len(rest) // max(1, sum(counts)))
    ends = list(accumulate((count * each for count in counts), initial=0))
    given = {name: rest[begin:end] for name, (begin, end) in zip(takers, pairwise(ends), strict=True)}
    left = frozenset(rest[ends[-1] :][:MAX_CORES])
    return Affinity(
        {name: frozenset(cores) for name, cores in own.items()},
        {name: frozenset(cores or given[name]) for name, cores in configured.items()},
        left or frozenset(free[:kept]),
    )


def describe(tenants: Mapping[str, Iterable[int]]) -> str:
    """The cores of tenants' HTTP processes, for the log."""
    return f"HTTP process {', '.join(f'of {name} on {_cores(cores)}' for name, cores in tenants.items())}"


def conflicts(configured: Mapping[str, Sequence[int] | None], partitions: Mapping[str, Iterable[int]]) -> Iterator[str]:
    """A warning for each tenant whose `front_cores` include cores of another tenant's partition, one for each such pair."""
    for name, cores in configured.items():
        for other, theirs in partitions.items():
            if name != other and (shared := set(cores or ()).intersection(theirs)):
                text = f"{ranges(shared)} is of {other}'s partition, whose work this tenant's HTTP would delay"
                yield f"{dotted(('tenants', name, 'front_cores'))}: {text}; leave it out, or name cores of no partition"


def _cores(numbers: Iterable[int]) -> str:
    numbers = frozenset(numbers)
    return f"core{'s' * (len(numbers) != 1)} {ranges(numbers)}"
