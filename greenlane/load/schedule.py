"""When requests are due, decided before the first is sent: an open loop does not wait for the server.

Seconds from the start of a phase, ascending.
"""

import random
from collections.abc import Sequence


def fixed(rate: float, seconds: float) -> list[float]:
    """Evenly spaced arrivals, `rate` of them a second, beginning half a gap after the start."""
    return [(number + 0.5) / rate for number in range(round(rate * seconds))]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrivals that do not know of each other, `rate` a second on average; the same ones for the same seed."""
    chance, now, arrivals = random.Random(seed), 0.0, []
    while (now := now + chance.expovariate(rate)) < seconds:
        arrivals.append(now)
    return arrivals


def arrivals(kind: str, rate: float, seconds: float, seed: int) -> list[float]:
    """A schedule of this kind. Raises ValueError for a kind other than `fixed` and `poisson`, or a rate that is not above 0."""
    if rate <= 0:
        raise ValueError(f"a rate of {rate} requests a second; expected more than 0")
    if kind == "fixed":
        return fixed(rate, seconds)
    if kind == "poisson":
        return poisson(rate, seconds, seed)
    raise ValueError(f"arrivals {kind!r}; expected fixed or poisson")


def share(schedule: Sequence[float], index: int, count: int) -> list[float]:
    """The share of process `index` of `count`: every count-th arrival."""
    return list(schedule[index::count])
