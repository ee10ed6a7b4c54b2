"""What lending costs a lender: when each phase is, and the verdicts. Pure; `lend` measures.

Two servers of the same configuration run at the same time, one of which lends nothing. The lender is timed on both in turns, at
several loads, while its borrower is as busy as it can be on the same one. So nothing differs but the lending.

The control is what the server counts: unless inferences of the borrower ran on the lender's share, and requests of the lender
came during some of them, nothing was lent, and that the lender did not feel it proves nothing. What the borrower gains is shown
and not judged: where other programs use the lender's cores it may gain nothing, and cost its lender something all the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from greenlane.load.figures import Samples
from greenlane.load.intervals import UNKNOWN, Interval, later
from greenlane.load.rules import NO_GROWTH, OTHERS, SOME, Growth, Ruling, failures, felt, grown, quantile_for

from .plan import GAP, Pair

State = Literal["off", "on"]
STATES: tuple[State, ...] = ("off", "on")
LOADS = (0.1, 0.3, 0.6)
"""Parts of its share's time that the lender uses."""
BOUND = 1.15
"""Times by which a lender's latency may grow where it lends."""
LAUNCHES, RETURNS = 20, 5
"""Inferences of the borrower's on the lender's share, and those of them during which the lender had a request again, from which
lending was exercised."""
WINDOW = 0.5
"""Seconds of a phase."""
IDLE, REQUESTS = 1.0, 4
"""Seconds from one request to the next where the first one after idling is timed, and requests of such a phase."""
IDLES = 2
"""Such phases of each state."""
FEWEST = 4
WARM_UP = 2.0
"""Seconds in which only the borrower is asked, before all phases: what its inferences take there has to be known first."""
START = 2.0 + WARM_UP
"""Seconds of a pair besides its phases."""
ROUND = len(LOADS) * len(STATES) * (WINDOW + GAP)
FIRST = IDLES * len(STATES) * (IDLE * (REQUESTS + 0.5) + GAP)


@dataclass(frozen=True, slots=True)
class Turn:
    """A phase: at which load (0: single requests, after idling), with lending or without, from when to when in seconds."""

    load: float
    state: State
    round: int
    begin: float
    end: float


class Borrowed(NamedTuple):
    """What the server counted of a borrower: `launches` on granules of others, `returns` of lenders during one, and `home`, why
    others stayed on its share.
    """

    launches: int = 0
    returns: int = 0
    home: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def of(cls, wide: Mapping[str, Any]) -> "Borrowed":
        """From `wide` in GET /admin/partitions."""
        return cls(wide.get("launches", 0), wide.get("returns", 0), wide.get("home_launches", {}))

    def since(self, before: "Borrowed") -> "Borrowed":
        """What was counted since then; all of it if the counts began again."""
        if self.launches < before.launches:
            return self
        home = {why: count - before.home.get(why, 0) for why, count in self.home.items()}
        return Borrowed(self.launches - before.launches, self.returns - before.returns, home)

    def lacks(self) -> str:
        """Why this shows nothing about lending; empty if it does."""
        if self.launches >= LAUNCHES and self.returns >= RETURNS:
            return ""
        common = max(self.home.items(), key=lambda each: each[1], default=("", 0))
        why = f", as most stayed on its share: {common[0]} {common[1]}" if common[1] > self.launches else ""
        if self.launches + sum(self.home.values()) < LAUNCHES:
            why = "; what takes less than 0.2 ms on cores stays on its own share, and is not counted"
        return (
            f"{self.launches} inferences of the borrower ran on the lender's share, {self.returns} of them when it had a "
            f"request; at least {LAUNCHES} and {RETURNS} are needed{why}"
        )


@dataclass(frozen=True, slots=True)
class Level:
    """The lender at one load: latencies of each round, requests a second, and what the borrower had answered a second."""

    load: float
    rate: float
    rounds: Mapping[State, tuple[Samples, ...]] = field(repr=False)
    borrower: Mapping[State, float]
    growth: Growth
    ruling: Ruling

    @property
    def gained(self) -> float:
        """How many times more the borrower had answered with lending."""
        return self.borrower["on"] / self.borrower["off"] if self.borrower["off"] else 1.0


@dataclass(frozen=True, slots=True)
class Lent:
    """A lender as the victim, and its borrower: `late` is by how many microseconds the first request after idling was."""

    pair: Pair
    model: str
    limit: float
    others: float
    borrowed: Borrowed
    levels: tuple[Level, ...]
    late: Interval
    first: Ruling

    @property
    def rulings(self) -> list[Ruling]:
        """All of them."""
        return [*(level.ruling for level in self.levels), self.first]


def rounds_in(seconds: float, pairs: int) -> int:
    """As many rounds of each of these pairs as there is time for; 0 for none."""
    return max(0, int((seconds / max(1, pairs) - START - FIRST) / ROUND))


def needed(pairs: int) -> float:
    """Seconds in which every pair is tried."""
    return pairs * (START + FIRST + FEWEST * ROUND)


def turns(rounds: int) -> list[Turn]:
    """All phases. Which state comes first changes from round to round."""
    found: list[Turn] = []
    at = GAP
    for turn in range(rounds):
        for load in LOADS:
            for state in STATES if turn % 2 else STATES[::-1]:
                found.append(Turn(load, state, turn, at, at + WINDOW))
                at += WINDOW + GAP
    for turn in range(IDLES):
        for state in STATES:
            found.append(Turn(0.0, state, turn, at, at + IDLE * (REQUESTS + 0.5)))
            at += IDLE * (REQUESTS + 0.5) + GAP
    return found


def _requests(number: int) -> str:
    return f"{number} request{'s' if number != 1 else ''}"


def decide(off: Sequence[Samples], on: Sequence[Samples], lacks: str, others: float) -> tuple[Ruling, Growth]:
    """The verdict at one load; `lacks` is what `Borrowed.lacks` says of all loads together."""
    if failed := failures(off):
        why = f"{_requests(failed)} of the lender failed while it did not lend"
        return felt(why, others) if others > OTHERS else Ruling("not exercised", why), NO_GROWTH
    if failed := failures(on):
        return felt(f"{_requests(failed)} of the lender failed while it lent, and none else", others), NO_GROWTH
    quantile = quantile_for(min(sum(map(len, off)), sum(map(len, on))))
    if quantile is None:
        return Ruling("too noisy", f"fewer than {SOME} requests: too few to judge, so give it more seconds"), NO_GROWTH
    growth = grown(off, on, quantile)
    if growth.leaks(BOUND):
        return felt(f"{growth.said(BOUND)} by lending; at most {BOUND:g} is allowed", others), growth
    if lacks:
        return Ruling("not exercised", lacks), growth
    if not growth.holds(BOUND):
        return Ruling("too noisy", f"{growth.said(BOUND)}, which may be more than {BOUND:g} or not"), growth
    return Ruling("isolated", growth.said(BOUND)), growth


def decide_first(off: Samples, on: Samples, limit: float, lacks: str) -> tuple[Ruling, Interval]:
    """The verdict on the first request after idling; `limit` is the lender's `lend` in microseconds."""
    if failures([off, on]):
        return Ruling("not exercised", "requests after idling failed"), UNKNOWN
    late = later(off.latency, on.latency)
    said = f"the first request after {IDLE:g} s of idling was {late.value / 1e3:.2f} ms late"
    interval = f"({late.low / 1e3:.2f} to {late.high / 1e3:.2f}, {limit / 1e3:g} allowed)"
    if late.low > limit:
        return Ruling("leaks", f"{said} {interval}"), late
    if lacks:
        return Ruling("not exercised", f"{said}, but nothing was lent, or hardly anything"), late
    return Ruling("isolated" if late.high <= limit else "too noisy", f"{said} {interval}"), late
