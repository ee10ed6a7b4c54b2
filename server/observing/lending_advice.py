"""What lending did for a tenant while it was measured, and what would let it do more. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from ..control.stretch import WidePartition
from .need import Need

IDLE = 0.2
"""A tenant whose partition is busy for less of the time could lend it. Not measured: so much is left in four fifths of it."""
MOSTLY = 0.5
"""From this part of all inferences on, why they stayed on the tenant's own granules is named."""


class Neighbour(NamedTuple):
    """Another tenant of the device. `busy` is None where nothing was measured; `lends`: whether it has `lend`."""

    name: str
    busy: float | None
    lends: bool


def advise_borrower(before: WidePartition, after: WidePartition, needs: Mapping[str, Need]) -> list[str]:
    """Sentences about a tenant's wide partition; none where nothing ran and all is well."""
    ran = max(0, after.launches - before.launches)
    home = {why: max(0, number - before.home_launches.get(why, 0)) for why, number in after.home_launches.items()}
    whole, lenders = ran + sum(home.values()), [each.owner for each in after.borrowed]
    sentences = []
    if whole and lenders:  # Otherwise the wide partition has gone meanwhile.
        lend = f"{' and '.join(lenders)} {'lends' if len(lenders) == 1 else 'lend'}"
        fact = f"{ran} of {whole} inferences ran on granules that {lend}"
        why, number = max(home.items(), key=lambda item: item[1], default=("", 0))
        named = number >= MOSTLY * whole and number
        sentences.append(f"{fact}; {_why(why, number, lenders, needs)}" if named else fact)
    return [*sentences, *after.too_long, *after.problems]


def advise_lender(tenant: str, lends: bool | None) -> list[str]:
    """A sentence about a tenant that has stopped lending; `lends` is None for one that never does."""
    if lends is not False:
        return []
    return [
        f"{tenant} lends nothing for now, as its own requests were later beside borrowers than without them. It lends again by "
        f"itself; `greenlane prove --lending` says whether it should"
    ]


def advise_neighbours(tenant: str, burst: int | None, neighbours: list[Neighbour]) -> list[str]:
    """A sentence about neighbours that a tenant which needs more could borrow from, where none of them lends yet."""
    idle = [each for each in neighbours if each.busy is not None and each.busy < IDLE and not each.lends]
    if not idle or any(each.lends for each in neighbours):
        return []
    names = ", ".join(f"{each.name} ({100 * (each.busy or 0):.0f} %)" for each in idle)
    how = "With `lend` there" if burst else f"With `lend` there and a `burst` for {tenant}"
    return [f"little used: {names}. {how}, {tenant} could use those granules while they are idle"]


def _why(why: str, number: int, lenders: list[str], needs: Mapping[str, Need]) -> str:
    """Why most inferences stayed at home, and what to do."""
    busy = ", ".join(f"{name} is busy {100 * needs[name].busy:.0f} % of the time" for name in lenders if name in needs)
    texts = {
        "in_flight": "another one of its own was running",
        "owner_busy": f"a lender had a request{f': {busy}' if busy else ''}",
        "owner_stopped": "a lender lent nothing for now, as its own requests were late",
        "not_measured": "what they take there is not known yet",
        "too_long": "they take longer than the lenders allow (`lend`)",
        "no_faster": "they are no faster there, so its `burst` brings nothing for these models",
        "fenced": "another tenant was at work, and there they could draw more of the memory than `memory_bandwidth`",
    }
    return f"for {number}, {texts.get(why, why)}"
