"""What lending costs a lender: when each phase is, and the verdicts. Pure; `lend` measures.

Two servers of the same configuration run at the same time, one of which lends nothing. The lender is timed on both in turns, at
several loads, while its borrower is as busy as it can be on the same one. So nothing differs but the lending.

The control is the borrower: unless more of its requests are answered where it may borrow, nothing was lent, and that the lender
did not feel it proves nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from greenlane.load.figures import Samples
from greenlane.load.intervals import UNKNOWN, Interval, later
from greenlane.load.rules import NO_GROWTH, SOME, Growth, Ruling, failures, felt, grown, quantile_for

from .plan import GAP, Pair

State = Literal["off", "on"]
STATES: tuple[State, ...] = ("off", "on")
LOADS = (0.1, 0.3, 0.6)
"""Parts of its share's time that the lender uses."""
BOUND = 1.15
"""Times by which a lender's latency may grow where it lends."""
GAINED = 1.05
"""Times by which the borrower's answers have to grow at the lowest load for anything to have been lent."""
WINDOW = 0.5
"""Seconds of a phase."""
IDLE, REQUESTS = 1.0, 4
"""Seconds from one request to the next where the first one after idling is timed, and requests of such a phase."""
IDLES = 2
"""Such phases of each state."""
FEWEST = 4
START = 2.0
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


def decide(off: Sequence[Samples], on: Sequence[Samples], gained: float, others: float) -> tuple[Ruling, Growth]:
    """The verdict at one load; `gained` is the borrower's at the lowest one."""
    if failed := failures(off):
        return Ruling("not exercised", f"{failed} requests of the lender failed while it did not lend"), NO_GROWTH
    if failed := failures(on):
        return felt(f"{failed} requests of the lender failed while it lent, and none else", others), NO_GROWTH
    quantile = quantile_for(min(sum(map(len, off)), sum(map(len, on))))
    if quantile is None:
        return Ruling("too noisy", f"fewer than {SOME} requests: too few to judge, so give it more seconds"), NO_GROWTH
    growth = grown(off, on, quantile)
    if growth.leaks(BOUND):
        return felt(f"{growth.said(BOUND)} by lending; at most {BOUND:g} is allowed", others), growth
    if gained < GAINED:
        return Ruling("not exercised", f"the borrower had {gained:.2f} times as much answered: nothing was lent"), growth
    if not growth.holds(BOUND):
        return Ruling("too noisy", f"{growth.said(BOUND)}, which may be more than {BOUND:g} or not"), growth
    return Ruling("isolated", f"{growth.said(BOUND)}, and the borrower had {gained:.2f} times as much"), growth


def decide_first(off: Samples, on: Samples, limit: float, gained: float) -> tuple[Ruling, Interval]:
    """The verdict on the first request after idling; `limit` is the lender's `lend` in microseconds."""
    if failures([off, on]):
        return Ruling("not exercised", "requests after idling failed"), UNKNOWN
    late = later(off.latency, on.latency)
    said = f"the first request after {IDLE:g} s of idling was {late.value / 1e3:.2f} ms late"
    interval = f"({late.low / 1e3:.2f} to {late.high / 1e3:.2f}, {limit / 1e3:g} allowed)"
    if late.low > limit:
        return Ruling("leaks", f"{said} {interval}"), late
    if gained < GAINED:
        return Ruling("not exercised", f"{said}, but nothing was lent"), late
    return Ruling("isolated" if late.high <= limit else "too noisy", f"{said} {interval}"), late
