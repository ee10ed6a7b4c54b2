"""What a tenant's models take of the device's memory, and whether one more fits (`tenants.NAME.device_memory`). Pure.

An engine that several tenants use counts in full for each of them: what a tenant may load, and is billed for, must not change
when another one loads or unloads the same model. So the sum over all tenants may be more than the device has in use.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..config.tables import dotted
from ..config.tenant import TenantConfig

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_MOST_NAMED = 5
"""How many models a refusal names at most."""


class Claim(NamedTuple):
    """A model, and the bytes of the device's memory that it takes or is expected to take, by kinds of `engines.base.MEMORY`.

    `least` is set if it takes more than that, as a model of which only the file's size is known.
    """

    label: str
    memory: Mapping[str, int]
    least: bool = False

    def __str__(self) -> str:
        return f"{sized(self.nbytes)} ({_parts(self.memory)})"

    @property
    def nbytes(self) -> int:
        return sum(self.memory.values())


def missing(limit: int, held: Iterable[Claim], needed: Claim) -> int:
    """By how many bytes a model is too large beside what the tenant has; 0 or less if it fits."""
    return sum(claim.nbytes for claim in held) + needed.nbytes - limit


def refusal(tenant: TenantConfig, held: Iterable[Claim], needed: Claim) -> str:
    """Why a model does not fit, with the arithmetic and what could be done."""
    limit, key = tenant.device_memory or 0, dotted(("tenants", tenant.name, "device_memory"))
    taken = sorted((claim for claim in held if claim.nbytes), key=lambda claim: -claim.nbytes)
    over = sized(missing(limit, taken, needed))
    need = f"it needs {'at least ' if needed.least else ''}{sized(needed.nbytes)} of device memory ({_parts(needed.memory)})"
    if needed.nbytes > limit or not taken:
        return f"{need}, but {tenant.name} may have {sized(limit)}: {over} too many; raise {key}"
    used = sized(sum(claim.nbytes for claim in taken))
    named = [f"{claim.label} {sized(claim.nbytes)}" for claim in taken[:_MOST_NAMED]]
    named += [f"{len(taken) - _MOST_NAMED} more"] if len(taken) > _MOST_NAMED else []
    hint = "" if tenant.paging else f", or set {dotted(('tenants', tenant.name, 'paging'))}"
    return (
        f"{need}, but {tenant.name} has {used} of {sized(limit)} in use by {', '.join(named)}: {over} too many; "
        f"unload something, raise {key}{hint}"
    )


def sized(nbytes: int) -> str:
    """A number of bytes for people."""
    for size, unit in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes} bytes"


def _parts(memory: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {sized(nbytes)}" for kind, nbytes in memory.items())
