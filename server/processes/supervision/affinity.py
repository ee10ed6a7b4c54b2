"""Where HTTP runs, and how many processes of it each tenant has, where devices set no cores aside for it. Pure arithmetic.

A thread that hands work to a GPU waits for every other thread that runs on its core. So HTTP processes stay off the cores of
the device processes, and each tenant's off the other tenants'. Cores are given out from the lowest number on: to the device
processes, to the tenants, and what is left to all others: the dispatcher, HTTP processes without a tenant, and builds.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType

from partitions.plan import ranges

from ...config.schema import Config
from ...config.tables import ConfigError, dotted
from ...config.tenant import TenantConfig

MAX_CORES = 2
"""Cores for one HTTP process: one Python thread, and the kernel's work on its behalf."""

OF_DEVICE = 2
"""Cores for one device process: its launch loop, and its Python threads, which wait for each other where they have one."""

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

    Of the cores that are in no tenant's configuration, half are for the processes of these devices, or two for each; the rest
    is for the tenants, in equal numbers for each HTTP process, but one for all others as far as each still has one;
    `processes` are the tenants with several. Where there are too few for that, every tenant has as many as every other. None if
    that leaves less than one core for each.
    """
    free = sorted(set(allowed).difference(*(cores or () for cores in configured.values())))
    takers = [name for name, cores in configured.items() if not cores]
    counts = [processes.get(name, 1) for name in takers]
    kept = max(len(free) // 2, min(OF_DEVICE * len(devices), len(free) - sum(counts) - 1)) if takers else len(free)
    rest, share = free[kept:], kept // len(devices)
    if not share or len(rest) < len(takers):
        return None
    last = len(devices) - 1  # It has what cannot be divided.
    own = {name: free[at * share : (at + 1) * share if at < last else kept] for at, name in enumerate(devices)}
    if sum(counts) > len(rest):
        counts = [1] * len(takers)
    each = min(MAX_CORES, max(1, (len(rest) - 1) // max(1, sum(counts))))
    ends = list(accumulate((count * each for count in counts), initial=0))
    given = {name: rest[begin:end] for name, (begin, end) in zip(takers, pairwise(ends), strict=True)}
    left = frozenset(rest[ends[-1] :])
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


MOST_AUTO = 4
"""HTTP processes of a tenant with "auto", at most."""
_HTTP_FRACTION = 2
"""One core in so many is for HTTP, as `share_cores` has it."""


def count(config: Config, hosted: Collection[str], cores: int) -> dict[str, int]:
    """The number of every tenant's HTTP processes, on a host with so many cores for this server.

    `hosted` are the devices that are cores of this host. Raises ConfigError if a tenant there is to have several.
    """
    counts: dict[str, int] = {}
    problems: list[str] = []
    for device in config.named_devices:
        tenants = [config.tenants[name] for name in config.tenants_on(device)]
        total = sum(map(_share, tenants))
        for tenant in tenants:
            asked = tenant.http_processes
            if device in hosted:
                key = dotted(("tenants", tenant.name, "http_processes"))
                problems += [f"{config.source}: {key}: {why}"] if (why := too_many(tenant)) else []
                counts[tenant.name] = 1
            elif asked == "auto":
                pairs = cores // _HTTP_FRACTION // MAX_CORES
                counts[tenant.name] = min(MOST_AUTO, max(1, pairs * _share(tenant) // total))
            else:
                counts[tenant.name] = asked
    if problems:
        raise ConfigError(problems)
    return counts


def too_many(tenant: TenantConfig) -> str:
    """Why a tenant on cores of the host cannot have the processes that it is to have; "" where it can."""
    if tenant.http_processes in (1, "auto"):
        return ""
    why = "on a CPU a tenant's models are in its one process, beside its HTTP"
    return f"{tenant.http_processes}, but {why}; leave it out, or give the tenant more cores"


def _share(tenant: TenantConfig) -> int:
    """The tenant's share, in a unit that is the same for the tenants of one device unless their files mix units."""
    return tenant.granules or tenant.sms or tenant.cores or 1
