"""A load of several processes: when its requests are due, and what the processes saw, brought together."""

from collections.abc import Sequence

from greenlane.load.figures import Samples, merged, percentile
from greenlane.load.jobs import Seen, Tally
from greenlane.load.processes import poisson


def fixed(rate: float, seconds: float) -> list[float]:
    """Evenly spaced arrivals, `rate` of them a second, beginning half a gap after the start."""
    return [(number + 0.5) / rate for number in range(round(rate * seconds))]


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


def together(results: Sequence[Seen | Tally]) -> tuple[Samples, list[Tally], float, int, list[bytes]]:
    """The open loops' samples as one, the closed loops' tallies, the client's own p99 delay, wrong sizes, and answers kept."""
    seen = [result for result in results if isinstance(result, Seen)]
    late = percentile(sorted(late for one in seen for late in one.late), 0.99)
    bodies = [body for one in seen for body in one.bodies]
    tallies = [result for result in results if isinstance(result, Tally)]
    return merged(one.samples for one in seen), tallies, late, sum(one.wrong for one in seen), bodies
