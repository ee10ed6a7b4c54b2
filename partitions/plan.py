"""Assigns granules to holders. Pure arithmetic, no hardware.

1. No granule has two holders.
2. A holder whose count does not change keeps exactly its granules.
3. A holder that shrinks keeps some of its granules, and one that grows keeps all of them, so as few as possible change
   holders.
4. Which granules those are is the same each time: each holder has an order in which it would have granules, its own first
   (`orders`). One that shrinks gives up its last, and one that grows takes the first that are free. So with two holders, and
   where the same ones give and take, a holder has the same granules whenever it has the same number of them, and the fewer
   are among the more.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import SupportsIndex

from .errors import DoesNotFit, PartitionError

Granules = tuple[int, ...]


NO_ORDERS: Mapping[str, Granules] = {}
"""Every holder's order is ascending."""


def assign(
    total: int, held: Mapping[str, Granules], counts: Mapping[str, int], orders: Mapping[str, Granules] = NO_ORDERS
) -> dict[str, Granules]:
    """The granules of each holder in `counts`, ascending.

    `total` is the number of granules of the device, `held` what each holder has now. Holders that are not in `counts` lose
    theirs. `orders` are those of holders, as `orders` makes them; the others' are ascending. Raises DoesNotFit with the sum if
    the counts exceed the total, ValueError for a count below one.
    """
    _check(total, counts)
    kept = {name: _ordered(held.get(name, ()), orders.get(name, ()))[:count] for name, count in counts.items()}
    taken = {granule for granules in kept.values() for granule in granules}
    free = {granule for granule in range(total) if granule not in taken}
    plan = {}
    for name, count in counts.items():
        more = _ordered(sorted(free), orders.get(name, ()))[: count - len(kept[name])]
        plan[name] = tuple(sorted((*kept[name], *more)))
        free.difference_update(more)
    return plan


def orders(total: int, own: Mapping[str, Granules]) -> dict[str, Granules]:
    """The order in which each holder would have granules.

    First its own, ascending; then those that no holder owns, ascending for every other holder and descending for the rest, so
    that two holders do not want the same one first; then those of the others, from their last to their first, those of the
    largest holder first.
    """
    owned = {granule for granules in own.values() for granule in granules}
    free = [granule for granule in range(total) if granule not in owned]
    largest = sorted(own, key=lambda name: (-len(own[name]), name))
    others = {name: [each for other in largest if other != name for each in sorted(own[other])[::-1]] for name in own}
    return {
        name: (*sorted(own[name]), *(free[::-1] if number % 2 else free), *others[name]) for number, name in enumerate(largest)
    }


def rung(held: Granules, order: Granules, count: int) -> Granules:
    """The granules that a holder of these would have if it had so many, ascending, as long as the others gave those.

    `order` is all granules of the device in the holder's order.
    """
    kept = _ordered(held, order)[:count]
    more = [granule for granule in order if granule not in held][: count - len(kept)]
    return tuple(sorted((*kept, *more)))


def _ordered(granules: Sequence[int], order: Granules) -> list[int]:
    """Granules in this order; those that it does not have come last, ascending."""
    place = {granule: index for index, granule in enumerate(order)}
    return sorted(granules, key=lambda granule: (place.get(granule, len(place)), granule))


def movers(before: Mapping[str, Granules], after: Mapping[str, Granules]) -> tuple[str, ...]:
    """The names whose granules differ between the two plans, sorted."""
    return tuple(sorted(name for name in {*before, *after} if before.get(name) != after.get(name)))


def choose(granules: Iterable[int], total: int) -> list[int]:
    """Check the indices of granules of a device that has `total`, and return them in ascending order.

    Raises PartitionError for none, for one that does not exist and for duplicates, TypeError for something other than numbers.
    """
    named = list(granules) if isinstance(granules, Iterable) else None
    if named is None or not all(isinstance(each, SupportsIndex) for each in named):
        raise TypeError(f"granules are named by a list of their numbers, such as [0, 1]; got {granules!r}")
    named = [each.__index__() for each in named]
    chosen = sorted(named)
    there = f"the device has {total}, {f'from 0 to {total - 1}' if total > 1 else 'number 0'}"
    if not chosen:
        raise PartitionError(f"no granules were named; {there}")
    if missing := [each for each in chosen if not 0 <= each < total]:
        raise PartitionError(f"{_subject(missing, named)} not there; {there}")
    if twice := [each for each, times in Counter(chosen).items() if times > 1]:
        raise PartitionError(f"{_subject(twice, named)} named more than once; expected each once")
    return chosen


def choose_lent(lent: Iterable[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """Check which of the chosen granules of a partition are lent by others, and return them in ascending order.

    Raises PartitionError for one that is not among them, for duplicates, and if all are; TypeError for something other than
    numbers.
    """
    if not isinstance(lent, Sequence) or not all(isinstance(each, SupportsIndex) for each in lent):
        raise TypeError(f"lent granules are named by a list of their numbers, such as [2, 3]; got {lent!r}")
    named = [each.__index__() for each in lent]
    if missing := [each for each in named if each not in chosen]:
        raise PartitionError(f"lent {_subject(missing, named)} not in the partition, which has {list(chosen)}")
    if twice := [each for each, times in Counter(named).items() if times > 1]:
        raise PartitionError(f"lent {_subject(twice, named)} named more than once; expected each once")
    if len(named) == len(chosen):
        raise PartitionError(f"all granules of {list(chosen)} are lent; expected at least one that is the holder's own")
    return tuple(sorted(named))


def _subject(some: list[int], named: list[int]) -> str:
    """The subject of an error's sentence: `granules 4, 9 of [0, 4, 9] are`."""
    noun, verb = ("granules", "are") if len(some) > 1 else ("granule", "is")
    return f"{noun} {', '.join(map(str, some))} of {named} {verb}"


def _check(total: int, counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}: {count} granules; every tenant needs at least 1")
    if (wanted := sum(counts.values())) > total:
        terms = " + ".join(f"{name} {count}" for name, count in counts.items())
        whole = f" = {wanted}" if len(counts) > 1 else ""
        raise DoesNotFit(f"{terms}{whole} granules, but the device has {total}: {wanted - total} too many")


def ranges(cores: Iterable[int]) -> str:
    """Numbers in the notation of the configuration: 0-3,6 for 0, 1, 2, 3 and 6."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in spans)
