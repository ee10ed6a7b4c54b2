"""On which cores the load processes run. Pure.

Where there are cores enough, on some that no server uses. On a few CPU cores that is a waste: there a client runs on a core of
its own tenant, as if a neighbour brought its noise along to its own share, and no client on another tenant's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .arrangement import Impossible, halves

ANY, TENANTS = "any", "tenants"
ENOUGH = 8
"""Cores of a machine that leaves some of them to the load processes alone, unless other cores are given."""
Asked = tuple[int, ...] | str | None
"""Cores for load processes only; TENANTS, each on its tenant's; ANY; None is whatever suits the machine."""


@dataclass(frozen=True, slots=True)
class Clients:
    """The cores of the victim's load process and of all others; none are any.

    `apart` are those that servers keep off: with any, the victim's client has its core to itself and spins.
    """

    victim: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    apart: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.victim:
            return "any"
        where = "kept apart" if self.apart else "of their tenants"
        return f"{_list(self.victim)} for the victim's, {_list(self.others) or 'any'} for the aggressors', {where}"


def apart(every: Sequence[int], asked: Asked) -> tuple[int, ...]:
    """Cores for load processes only: those asked for, or the last quarter of enough."""
    if asked is None and len(every) >= ENOUGH:
        return tuple(every[-(len(every) // 4) :])
    return asked if isinstance(asked, tuple) else ()


def place(device: str, carved: Sequence[int], granules: int, alone: tuple[int, ...], asked: Asked) -> Clients:
    """Where they run: on cores `alone` for them if there are any, or by the partitions of a CPU's `carved` cores.

    Raises Impossible.
    """
    if alone:
        return Clients(alone[:1], alone[1:], alone)
    if device != "cpu" and asked == TENANTS:
        raise Impossible(f"clients on the cores of their tenants ('{TENANTS}'): a GPU's tenants have none")
    if device != "cpu" or asked == ANY:
        return Clients()
    one, other = halves(device, granules)
    return Clients(tuple(carved[:1]), tuple(carved[one : one + other]))


def _list(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))
