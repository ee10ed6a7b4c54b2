"""Whether one tenant's load was felt by another: a verdict from how much latency grew, and how sure that is. Pure.

Why each rule is as it is:

- **leaks** needs a growth over the bound, and an interval that lies above SURE. The bound alone would call chance a leak; the
  interval alone would call a growth of 1 % one, given requests enough. SURE is more than 1 because the interval is narrower
  than it should be where a few stalls decide the tail: of 900 simulated runs without a leak, 2 were called one with 1.
- **isolated** needs an interval that ends below the bound: not "no leak was seen", but "a leak of that size would have been".
- **isolated** also needs a control that leaks by the same rule: the same load in the victim's own partition. Where that is not
  felt either, the load or the client was too weak, and the result would have been the same without partitions.
- **not exercised** is also what it is called where the aggressor did little of what it does when it is not disturbed.
- **too noisy** is the rest: the interval contains both answers. More time narrows it; a busy machine may never.
- The median counts as well as the tail, and the worse of both decides. A p99 of some hundred requests is decided by five of
  them, so that a leak that all requests feel shows in the median first.
- Other programs on the machine can look like a leak: an aggressor that keeps its own cores busy leaves them the victim's. So
  nothing is called a leak while they used more than OTHERS of the cores. Isolated it can be all the same. A leak is plain
  where they used less than PLAIN_OTHERS and the median surely grew more than PLAIN times in every round: they can be in the
  way of some requests and so of the tail, but not of every second request in all rounds.
- A request of the victim's that fails beside the aggressor is a leak whatever the latencies are; one that fails alone says that
  nothing here can be compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .figures import Samples
from .intervals import UNKNOWN, Interval, growth

Word = Literal["isolated", "leaks", "not exercised", "too noisy"]
WORDS: tuple[Word, ...] = ("leaks", "not exercised", "too noisy", "isolated")
"""The worst first: the verdict of several together is the first that any of them has."""
BOUND = 1.3
"""Times by which latency may grow: the target of docs/performance.md."""
ENOUGH = 150
"""Requests in a phase's total from which a p99 is taken: with fewer it is one of the two slowest."""
SOME = 40
"""Requests from which a p90 is taken in its place; with fewer nothing is judged."""
BUSY = 0.5
"""The part of the time in which an aggressor has to keep its own partition or process busy."""
OTHERS = 0.1
"""The part of the cores' time that other programs may use where a leak is to be called one."""
PLAIN_OTHERS = 0.25
"""The part of the cores' time from which on other programs may be in the way of every second request."""
PLAIN = 3.0
"""Times by which the median surely grew in every round, where that is no work of other programs."""
SURE = 1.1
"""Times by which latency surely grew, where it is called a leak."""
MEDIAN = 0.5


@dataclass(frozen=True, slots=True)
class Growth:
    """How many times the victim's median and tail grew; `quantile` is that of the tail."""

    quantile: float
    median: Interval
    tail: Interval

    def leaks(self, bound: float) -> bool:
        """Whether one of them grew over the bound, and surely grew."""
        return any(each.value > bound and each.low > SURE for each in (self.median, self.tail))

    def holds(self, bound: float) -> bool:
        """Whether both are surely within the bound."""
        return all(each.high <= bound for each in (self.median, self.tail))

    def decisive(self, bound: float) -> Interval:
        """The one that the verdict rests on: the larger of those that leak, or else the one that comes nearest to it."""
        leaking = [each for each in (self.median, self.tail) if each.value > bound and each.low > SURE]
        return max(leaking, key=lambda each: each.value) if leaking else max(self.median, self.tail, key=lambda each: each.high)

    def said(self, bound: float) -> str:
        """The same in words."""
        one = self.decisive(bound)
        return f"{'the median' if one is self.median else f'p{self.quantile * 100:g}'} grew {one} times"


NO_GROWTH = Growth(0.99, UNKNOWN, UNKNOWN)
"""What is not known: neither leaks nor holds."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """A verdict and a sentence that says why."""

    word: Word
    why: str


def quantile_for(count: int) -> float | None:
    """The tail that so many requests can show; None if they are too few for any."""
    return 0.99 if count >= ENOUGH else 0.9 if count >= SOME else None


def grown(before: Sequence[Samples], after: Sequence[Samples], quantile: float) -> Growth:
    """By how much latency grew, in phases of the same rounds."""
    return Growth(quantile, growth(before, after, MEDIAN), growth(before, after, quantile))


def failures(rounds: Sequence[Samples]) -> int:
    """Requests that were not answered with 200."""
    return sum(status != 200 for samples in rounds for status in samples.status)


def compare(alone: Sequence[Samples], beside: Sequence[Samples], control: Sequence[Samples]) -> tuple[Growth, Growth]:
    """How latency grew beside the aggressor, and in the control, by the tail that the fewest requests of the three can show."""
    fewest = min(sum(map(len, rounds)) for rounds in (alone, beside, control))
    quantile = quantile_for(fewest)
    if quantile is None:
        return NO_GROWTH, NO_GROWTH
    return grown(alone, beside, quantile), grown(alone, control, quantile)


def rule(
    alone: Sequence[Samples], beside: Sequence[Samples], control: Sequence[Samples], busy: float, others: float = 0.0
) -> tuple[Ruling, Growth, Growth]:
    """The verdict on three sets of phases; `busy` is the part of the time in which the aggressor was, beside the victim.

    `others` is the part of the cores' time that other programs used meanwhile.

    Also returns how latency grew beside the aggressor and in the control.
    """
    held, shared = compare(alone, beside, control)
    if OTHERS < others < PLAIN_OTHERS and plain(alone, beside):
        others = OTHERS
    return decide(held, shared, [failures(alone), failures(beside), failures(control)], busy, others, BOUND), held, shared


def plain(alone: Sequence[Samples], beside: Sequence[Samples]) -> bool:
    """Whether the median surely grew more than PLAIN times in each of at least two rounds."""
    each = [growth([before], [after], MEDIAN) for before, after in zip(alone, beside, strict=True)]
    return len(each) > 1 and all(one.low > PLAIN for one in each)


def decide(held: Growth, shared: Growth, failed: Sequence[int], busy: float, others: float, bound: float) -> Ruling:
    """The verdict; `failed` are the requests that failed alone, beside the aggressor and in the control."""
    alone, beside, control = failed
    if alone:
        why = f"{alone} requests of the victim failed without any aggressor"
        return felt(why, others) if others > OTHERS else Ruling("not exercised", why)
    if beside:
        return felt(f"{beside} requests of the victim failed beside the aggressor, and none alone", others)
    if math.isnan(held.tail.value) or math.isnan(shared.tail.value):
        return Ruling("too noisy", f"fewer than {SOME} requests in one of the three: too few to judge, so give it more seconds")
    if held.leaks(bound):
        return felt(f"{held.said(bound)} beside the aggressor; at most {bound:g} is allowed", others)
    if busy < BUSY:
        why = f"the aggressor was busy for {busy:.0%} of the time; at least {BUSY:.0%} is needed: give it a heavier model"
        return Ruling("not exercised", why)
    if not (control or shared.leaks(bound)):
        return Ruling("not exercised", f"{shared.said(bound)} in one partition with the aggressor, too little to be proof")
    if not held.holds(bound):
        return Ruling("too noisy", f"{held.said(bound)}, which may be more than {bound:g} or not")
    by = f"{control} requests failed" if control else shared.said(bound)
    return Ruling("isolated", f"{held.said(bound)} beside the aggressor; in one partition with it {by}")


def felt(what: str, others: float) -> Ruling:
    """The verdict on what looks like a leak, while other programs used this part of the cores' time."""
    if others > OTHERS:
        return Ruling("too noisy", f"{what}; but other programs used {others:.0%} of the cores: stop them to judge")
    return Ruling("leaks", what)


def worst(words: Sequence[Word]) -> Word:
    """The verdict of several together; nothing at all is not exercised."""
    return min(words, key=WORDS.index) if words else "not exercised"
