"""What the keys `memory_bandwidth` and `pcie` of tenants come to on a device. Pure."""

import math
from collections.abc import Mapping, Sequence

from partitions.base import Bandwidth
from partitions.plan import Granules

from .forms import RATES, write_rate
from .tables import dotted
from .tenant import FENCES, TenantConfig
from .values import LEAST_RATE

NAMES = {"memory_bandwidth": "memory bandwidth", "pcie": "PCIe"}
"""What FENCES are shares of."""
_MOST = 1 + 1e-9
"""The sum of parts such as 0.3, which are not exact."""


def whole(key: str, moves: Bandwidth | None) -> int:
    """The bytes a second of which this key is a share; 0 if that is not known."""
    return 0 if moves is None else moves.memory if key == "memory_bandwidth" else moves.pcie


def own_part(home: Granules, sizes: Sequence[int]) -> float:
    """The part of a device's units that these granules have: what a share "auto" is, as the last granule may be larger."""
    return sum(sizes[granule] for granule in home) / sum(sizes)


def rate(tenant: TenantConfig, key: str, own: float, there: int) -> int:
    """The bytes a second that a tenant with this part of the units is held to, of so many; 0 for none, or for one not known.

    A part is `LEAST_RATE` at least, as a rate is: with less it would have nothing, and with 0 nothing would hold it.
    """
    value = getattr(tenant, key)
    if value is None or not there:
        return 0
    if isinstance(value, int):
        return value
    return max(LEAST_RATE, int((own if value == "auto" else value) * there))


def too_much(
    tenants: Mapping[str, TenantConfig], homes: Mapping[str, Granules], sizes: Sequence[int], moves: Bandwidth | None
) -> list[str]:
    """Why shares of bandwidth add up to more than there is, for tenants that have these granules, on a device of these sizes.

    Rates do not count where the whole is not known.
    """
    problems = []
    for key in FENCES:
        parts = {
            name: _part(getattr(tenants[name], key), own_part(home, sizes), whole(key, moves)) for name, home in homes.items()
        }
        known = {name: part for name, part in parts.items() if part is not None}
        if (total := sum(known.values())) > _MOST:
            terms = " + ".join(_term(tenants[name], key, part) for name, part in known.items())
            of, them = f"of the device's {NAMES[key]}", "them" if len(known) > 1 else "it"
            if there := whole(key, moves):
                of += f", which is {in_words(there)}"
            lower = _rounded_up(total - _MOST)
            problems.append(f"{terms} = {total:.{max(3, 1 - _exponent(lower))}g} {of}: lower {them} by {lower:g}")
    return problems


def in_words(count: int) -> str:
    """Bytes a second with four digits."""
    unit, factor = next((each for each in RATES.items() if count >= each[1]), ("MB", RATES["MB"]))
    return f"{count / factor:.4g} {unit}/s"


def _exponent(number: float) -> int:
    return math.floor(math.log10(number))


def _rounded_up(number: float) -> float:
    """In two digits, as what is lowered by less does not fit."""
    digits = 1 - _exponent(number)
    return round(math.ceil(number * 10.0**digits) / 10.0**digits, digits)


def _part(value: object, own: float, there: int) -> float | None:
    if isinstance(value, int):
        return value / there if there else None
    return own if value == "auto" else value if isinstance(value, float) else None


def _term(tenant: TenantConfig, key: str, part: float) -> str:
    value = getattr(tenant, key)
    text = f"{value:.12g}" if isinstance(value, float) else f"{value if value == 'auto' else write_rate(value)} ({part:.3g})"
    return f"{dotted(('tenants', tenant.name, key))} {text}"
