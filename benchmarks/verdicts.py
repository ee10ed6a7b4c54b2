"""The verdict of one combination's rounds: did the partition isolate, and was there any noise to isolate from? Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from greenlane.load.figures import Figures, Samples, figures
from greenlane.load.intervals import Interval, grown, growth

ALONE, UNDER, CONTROL_ALONE, CONTROL = "alone", "under load", "control, alone", "control, under load"
KINDS = (ALONE, UNDER, CONTROL_ALONE, CONTROL)
OWN, CONTROL_OWN = "aggressor alone", "control, aggressor alone"
"""Phases without a victim, which are measured where the aggressor is fenced, as the fence is to cost it nothing then."""
LEARNING = "aggressor, so that the server learns what it slows"
WARMING, CONTROL_WARMING = "warm-up", "control, warm-up"
UNKEPT = (LEARNING, WARMING, CONTROL_WARMING)
"""Phases of which nothing is kept."""
INTERFERENCE = 1.2
"""The least that the victim's p99 has to grow on one partition for a combination to prove anything."""
STEADY = 3.0
"""How many times its least the victim's p99 alone may be, by the median over rounds, and still be a measure for anything."""


@dataclass(slots=True)
class Phase:
    """One measurement: of which kind, in which round, when it began (seconds into the experiment), what came of it.

    `busy` is what the aggressors got done meanwhile, `own` the microseconds (p99) by which the client itself was late.
    """

    kind: str
    round: int
    began: float
    samples: Samples
    busy: list[dict[str, Any]] = field(default_factory=list)
    own: float = 0.0
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class Combination:
    """A victim and an aggressor with all their phases; the phases of a kind are in the order of rounds."""

    victim: str
    aggressor: str
    phases: tuple[Phase, ...]
    bound: float

    def of(self, kind: str) -> list[Phase]:
        """The phases of one kind."""
        return [phase for phase in self.phases if phase.kind == kind]

    def rounds(self, kind: str) -> list[Figures]:
        """The figures of each phase of one kind."""
        return [figures(phase.samples) for phase in self.of(kind)]

    def verdict(self) -> "Verdict":
        """Everything that the table shows. Raises ValueError unless there are as many phases alone as under load."""
        return judge(self.victim, self.aggressor, {kind: self.rounds(kind) for kind in KINDS}, self.wrong, self.bound)

    def own(self, kind: str) -> float:
        """Answers a second that the aggressor got in phases of one kind; NaN without any."""
        rates = [sum(row["rate"] for row in phase.busy) for phase in self.of(kind)]
        return median(rates) if rates else math.nan

    @property
    def growth(self) -> Interval:
        """How many times p99 grew beside the aggressor, over all rounds together, with the interval of `greenlane prove`."""
        return growth(self._samples(ALONE), self._samples(UNDER), 0.99)

    def grew(self, alone: str, under: str, quantile: float) -> float:
        """The same of phases of these kinds, and of any percentile, without an interval."""
        return grown(self._samples(alone), self._samples(under), quantile)

    def _samples(self, kind: str) -> list[Samples]:
        return [phase.samples for phase in self.of(kind)]

    @property
    def wrong(self) -> int:
        """Answers that were 200 and not what the model says."""
        return sum(phase.wrong for phase in self.phases)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table: medians over rounds, ratios of under load to alone, and what they say.

    `control` is None, and `control_ratio` NaN, where there was no control. `spread` is the median p99
    alone over the least. `fewest` is the number of requests in the shortest of the phases.
    """

    victim: str
    aggressor: str
    alone: Figures
    under: Figures
    control: Figures | None
    ratios: dict[str, float]
    control_ratio: float
    spread: float
    word: str
    why: str
    fewest: int


def judge(victim: str, aggressor: str, rounds: Mapping[str, Sequence[Figures]], wrong: int, bound: float) -> Verdict:
    """Compare the rounds of each kind; `bound` is what the victim's p99 may grow by in its partition."""
    alone, under = rounds[ALONE], rounds[UNDER]
    control = rounds[CONTROL]
    ratios = {name: ratio(under, alone, name) for name in ("p50", "p99", "p999")}
    control_ratio = ratio(control, rounds[CONTROL_ALONE], "p99")
    held, noisy = medians(under), medians(control) if control else None
    spread = medians(alone).p99 / min(one.p99 for one in alone)
    fewest = min(one.count for one in (*alone, *under, *control))
    certain = min(one.p99 for one in under) > bound * max(one.p99 for one in alone)  # It leaks, whichever is right.
    word, why = decide(ratios["p99"], control_ratio, held.failed, wrong, bound, certain or spread <= STEADY)
    return Verdict(victim, aggressor, medians(alone), held, noisy, ratios, control_ratio, spread, word, why, fewest)


def medians(rounds: Sequence[Figures]) -> Figures:
    """Counts summed, latencies as medians over the rounds."""
    latencies = (median(getattr(one, name) for one in rounds) for name in ("p50", "p99", "p999", "worst"))
    return Figures(sum(one.count for one in rounds), sum(one.failed for one in rounds), *latencies)


def ratio(under: Sequence[Figures], alone: Sequence[Figures], name: str) -> float:
    """The median over rounds of how many times larger a figure was, round by round; NaN without rounds."""
    ratios = [getattr(one, name) / getattr(base, name) for one, base in zip(under, alone, strict=True)]
    return median(ratios) if ratios else math.nan


def decide(held: float, control: float, failed: int, wrong: int, bound: float, steady: bool = True) -> tuple[str, str]:
    """A word and a sentence, from how many times the p99 grew in the partition and on one that everybody shares."""
    if wrong:
        return "WRONG", f"{wrong} answers were not what the model says"
    if failed:
        return "FAILED", f"{failed} requests of the victim in its own partition were not answered with 200"
    if not steady:
        return "too noisy", "alone, p99 differed too much between rounds, as if something else was busy on this machine"
    if not held <= bound:
        return "leaks", f"p99 grew {held:.2f} times in the victim's own partition; at most {bound:.2f} is allowed"
    if math.isnan(control):
        return "no control", f"p99 grew {held:.2f} times, and nothing says what it would have done otherwise"
    if control < INTERFERENCE:
        return "not exercised", f"in the control p99 grew only {control:.2f} times: there was nothing to hold against"
    return "isolated", f"p99 grew {held:.2f} times in the victim's own partition, and {control:.2f} times in the control"
