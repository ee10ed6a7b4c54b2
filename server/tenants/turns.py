"""Shares requests out by weights. Pure."""

from collections.abc import Mapping
from fractions import Fraction
from math import lcm


class Turns:
    """A smooth weighted round robin, as nginx has it: each name comes as often as its weight says, evenly spread.

    The same weights always give the same order. After n turns a name has never had more than one turn above its share of n, and
    once n is a multiple of `period` each has had exactly its share.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Weights above 0; those that are 0 never have a turn."""
        shares = {
            name: Fraction(repr(weight)) for name, weight in weights.items() if weight
        }  # 0.1 is a tenth: as it is written.
        unit = lcm(*(share.denominator for share in shares.values()))
        self.weights = dict(weights)
        self._shares = {name: int(share * unit) for name, share in shares.items()}
        self.period = sum(self._shares.values())
        self._due = dict.fromkeys(self._shares, 0)
        """How much each is behind its share, in units of `period`."""

    def __repr__(self) -> str:
        return f"<Turns {self.weights}>"

    def next(self) -> str:
        """The name whose turn it is."""
        due = self._due
        for name, share in self._shares.items():
            due[name] += share
        chosen = max(due, key=due.__getitem__)
        due[chosen] -= self.period
        return chosen
