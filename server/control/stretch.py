"""Which granules each tenant with a burst may borrow, and from whom. Pure arithmetic."""

from collections.abc import Mapping
from typing import NamedTuple

from partitions.plan import Granules

MOST_LENDERS = 16
"""Tenants that one may borrow from at a time: its launch loop looks at 256 of their HTTP processes."""


class Wide(NamedTuple):
    """A tenant's wide partition: all its granules, those of each lender, and the seconds that a work may take there."""

    granules: Granules
    lent: Mapping[str, Granules]
    limit: float


class WideState(NamedTuple):
    """A tenant's wide partition as its device side has it.

    `launches` are works that ran there so far, and `returns` those of them during which a lender came back; `home_launches` are
    works that could not, by why. `too_long` names models that never run there as their works are longer than lenders allow.
    `problems` say what could not be made: the partition, or a model's executor there.
    """

    tenant: str
    granules: Granules
    lent: Mapping[str, Granules]
    launches: int
    returns: int
    home_launches: Mapping[str, int]
    too_long: tuple[str, ...]
    problems: tuple[str, ...]


def plan_wide(homes: Mapping[str, Granules], most: Mapping[str, int], lend: Mapping[str, float]) -> dict[str, Wide]:
    """The wide partition of each tenant that may have more granules than it holds, where another one lends some.

    `most` is the granules that each may use at a time, and `lend` the seconds for which each lends, 0 for those that do not.
    Borrowers choose in turn, one granule at a time: first of lenders that they have some of already, since all lenders of a
    wide partition have to rest, and the nearest to their own. A granule is lent to one borrower only, so its lender waits for
    one.
    """
    left = {granule: lender for lender, granules in homes.items() if lend.get(lender, 0) > 0 for granule in granules}
    taken: dict[str, list[int]] = {name: [] for name in homes if most.get(name, 0) > len(homes[name])}
    lenders = dict(left)
    hungry = list(taken)
    while hungry:
        for name in list(hungry):
            own, mine = homes[name], taken[name]
            among = {lenders[granule] for granule in mine}
            full = len(among) >= MOST_LENDERS
            there = [granule for granule, lender in left.items() if lender != name and (lender in among or not full)]
            if len(own) + len(mine) >= most[name] or not there:
                hungry.remove(name)
                continue
            nearest = min(there, key=lambda each: (lenders[each] not in among, min(abs(each - one) for one in own), each))
            mine.append(nearest)
            del left[nearest]
    plan = {}
    for name, mine in taken.items():
        if mine:
            lent = {lender: tuple(sorted(each for each in mine if lenders[each] == lender)) for lender in homes}
            lent = {lender: granules for lender, granules in lent.items() if granules}
            plan[name] = Wide(tuple(sorted((*homes[name], *mine))), lent, min(lend[lender] for lender in lent))
    return plan
