"""Which models to page out. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from ..link.messages import ModelKey


class Resident(NamedTuple):
    """A model that could be paged out: the bytes that this frees, and when it was last used, in any unit."""

    model: ModelKey
    nbytes: int
    used: int


def choose(residents: Iterable[Resident], missing: int) -> list[Resident] | None:
    """The models to page out to free so many bytes, the least recently used first; None if all of them are not enough.

    Models that were used at the same time go in the order given. No model is among them without need: if a large one makes an
    earlier, smaller one superfluous, that stays.
    """
    chosen: list[Resident] = []
    freed = 0
    for each in sorted(residents, key=lambda resident: resident.used):
        if freed >= missing:
            break
        if each.nbytes > 0:
            chosen.append(each)
            freed += each.nbytes
    if freed < missing:
        return None
    for each in reversed(chosen[:]):  # Of those that need not go, the most recently used stay.
        if freed - each.nbytes >= missing:
            chosen.remove(each)
            freed -= each.nbytes
    return chosen
