"""Which granules each tenant with a burst may borrow, and from whom. Pure arithmetic."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from partitions.plan import Granules

from ..facts import Fact

MOST_LENDERS = 16
"""Tenants that one may borrow from at a time: its launch loop looks at 256 of their HTTP processes."""


class Wide(NamedTuple):
    """A tenant's wide partition: all its granules, those of each lender, and the seconds that a work may take there."""

    granules: Granules
    lent: Mapping[str, Granules]
    limit: float


class LentGranules(Fact):
    """Granules of one tenant, the lender, in the wide partition of another; the lender is `owner` here."""

    owner: str
    granules: Annotated[Granules, "Indices of granules."]


class WidePartition(Fact):
    """A tenant's partition for while others are idle: its own granules, and those that they lend."""

    granules: Annotated[Granules, "Indices of all its granules; empty if it could not be made."]
    borrowed: list[LentGranules]
    launches: Annotated[int, "Inferences that ran there so far."]
    returns: Annotated[int, "Those of them during which a lender had a request again."]
    home_launches: Annotated[
        dict[str, int],
        "Inferences that stayed on the tenant's own granules, by why: it could have run there, but another one of "
        "its own was running (`in_flight`), a lender had a request (`owner_busy`) or lends nothing for now (`owner_stopped`), "
        "what it takes is not known yet (`not_measured`), it takes longer than the lenders' `lend` (`too_long`), or no less "
        "than at home (`no_faster`), or it could draw too much there beside a tenant that is at work (`fenced`).",
    ]
    too_long: Annotated[list[str], "Models that never run there as they take too long, with the figures."]
    problems: Annotated[list[str], "What could not be made, so that it runs on the tenant's share only."]


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
