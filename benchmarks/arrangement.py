"""The deployments that the experiment compares: which tenants share which granules of the device. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .deployment import Deployment, Tenant
from .kinds import KINDS, TRIO, TRIO_OF
from .subjects import SUBJECTS

SPLIT, SHARED, QUARTERS = "split", "shared", "quarters"
VICTIM, AGGRESSOR, EVERYONE = "victim", "aggressor", "everyone"
LIGHT = "identity"
"""What an aggressor that is fenced is asked as well, where its work is not to be felt."""
MOST_CORES = 4
"""Cores of a partition of CPU cores: the models have no use for more."""


class Impossible(Exception):
    """The requested experiment is not possible, on this device or at all."""


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores that servers may use: `carved` by a CPU device, and as many of `fronts` for each tenant's HTTP process."""

    all: tuple[int, ...]
    carved: tuple[int, ...]
    fronts: tuple[tuple[int, ...], ...] = ()

    def of(self, tenant: int, last: int | None = None) -> tuple[int, ...]:
        """Those of one tenant's HTTP process, by its place in the file, or of all from there to `last` together."""
        places = self.fronts[tenant : tenant + 1 if last is None else last + 1]
        return tuple(core for place in places for core in place)


def share_cores(every: Sequence[int], own: Sequence[int], each: int, tenants: int) -> Cores:
    """Take the load processes' own away, then `each` cores for every tenant's HTTP process. Raises Impossible."""
    left = tuple(core for core in every if core not in own)
    if each * tenants >= len(left) and each:
        raise Impossible(f"{each} cores for each of {tenants} HTTP processes leave none of {len(left)} for the rest")
    split = len(left) - each * tenants
    fronts = tuple(left[at : at + each] for at in range(split, len(left), each)) if each else ()
    return Cores(left, left[:split], fronts)


def deployments(
    device: str,
    granules: int,
    victims: Sequence[str],
    kinds: Sequence[str],
    cores: Cores,
    fence: str | None = None,
    mps: str = "off",
) -> dict[str, Deployment]:
    """The servers by their names: SPLIT with a partition for the victims and one for the aggressor, SHARED with one for all.

    For the three aggressors at a time, QUARTERS with four partitions of one size. With a `fence` SPLIT holds the aggressor to
    such a part of memory bandwidth and PCIe, and SHARED is the same two partitions without it. `mps` is as in the
    configuration. Raises Impossible.
    """
    models = tuple(sorted({model for kind in kinds for model in _models(kind)}))
    one, other = halves(device, granules)
    held = Tenant(VICTIM, one, tuple(victims), cores.of(0)), Tenant(AGGRESSOR, other, models, cores.of(1))
    tenants: dict[str, tuple[Tenant, ...]] = {SPLIT: held}
    if fence is not None:
        held = held[0], replace(held[1], models=tuple(sorted({*models, LIGHT})))
        tenants = {SPLIT: (held[0], fenced(held[1], fence)), SHARED: held}
    else:
        everything = granules if device == "cuda" else one + other
        tenants[SHARED] = (Tenant(EVERYONE, everything, tuple(sorted({*victims, *models})), cores.of(0, 1)),)
    streamed = [model for model in models if device == "cuda" and SUBJECTS[model].kept]
    options = tuple(line for model in streamed for line in (f"[models.{model}]", f'weight_budget = "{SUBJECTS[model].kept}"'))
    if TRIO in kinds:
        tenants[QUARTERS] = _quarters(fourth(device, granules), victims, cores)
    return {
        name: Deployment(name, device, group, cores.all, cores.carved, mps=mps, options=options)
        for name, group in tenants.items()
    }


def fenced(tenant: Tenant, fence: str) -> Tenant:
    """The tenant, held to such a part of memory bandwidth and PCIe."""
    return replace(tenant, settings=tuple(f"{key} = {literal(fence)}" for key in ("memory_bandwidth", "pcie")))


def literal(fence: str) -> str:
    """A part, a rate or "auto" as a TOML file has it."""
    try:
        return f"{float(fence):g}"
    except ValueError:
        return json.dumps(fence)


def _quarters(each: int, victims: Sequence[str], cores: Cores) -> tuple[Tenant, ...]:
    aggressors = [
        Tenant(f"{AGGRESSOR}-{kind}", each, (KINDS[kind].model,), cores.of(index)) for index, kind in enumerate(TRIO_OF, 1)
    ]
    return (Tenant(VICTIM, each, tuple(victims), cores.of(0)), *aggressors)


def halves(device: str, granules: int) -> tuple[int, int]:
    """Granules of the victim and of the aggressor. A GPU's last granule may be of another size and is left out.

    Raises Impossible.
    """
    if granules < 2:
        raise Impossible(f"the device has {granules} granule; two tenants need 2")
    if device == "cuda":
        return granules // 2, max(1, granules - 1 - granules // 2)
    return min(MOST_CORES, granules // 2), min(MOST_CORES, granules // 2)


def fourth(device: str, granules: int) -> int:
    """Granules of each of four tenants. Raises Impossible."""
    if granules < 4:
        raise Impossible(f"the device has {granules} granules; four tenants need 4")
    return granules // 4 if device == "cuda" else min(MOST_CORES, granules // 4)


def _models(kind: str) -> set[str]:
    return {KINDS[name].model for name in (TRIO_OF if kind == TRIO else (kind,))}
