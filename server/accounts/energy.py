"""Whose energy it was: what a device takes beyond its idle power, divided by what each model used meanwhile."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


class IdlePower:
    """The power of a device on which nothing runs: the least that was seen. Pure."""

    def __init__(self) -> None:
        self._microwatts: int | None = None

    def __repr__(self) -> str:
        return f"<IdlePower {self._microwatts} uW>"

    def part(self, energy: int, ns: int, used: bool) -> int:
        """How much of the microjoules of the last `ns` nanoseconds was idle power; `used`: whether anything ran meanwhile.

        All of it if nothing ran. Without any idle phase so far nothing is known, and none of it.
        """
        if not used:
            if ns > 0:
                power = energy * 10**9 // ns
                self._microwatts = power if self._microwatts is None else min(power, self._microwatts)
            return energy
        return min(energy, (self._microwatts or 0) * ns // 10**9)


def divide(amount: int, weights: Mapping[K, int]) -> dict[K, int]:
    """Integers in proportion to the weights, which have a sum above 0; together exactly `amount`. Largest remainders first."""
    total = sum(weights.values())
    parts = {key: amount * weight // total for key, weight in weights.items()}
    left = amount - sum(parts.values())
    for key in sorted(weights, key=lambda key: amount * weights[key] % total, reverse=True)[:left]:
        parts[key] += 1
    return parts
