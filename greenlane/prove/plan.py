"""What is measured in the time there is: which pairs, which kinds of aggressor, and when each phase is. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, Protocol

from greenlane.load.figures import Samples, merged

Which = Literal["alone", "beside", "control"]
PHASES: tuple[Which, ...] = ("alone", "beside", "control")
WINDOWS: dict[Which, float] = {"alone": 0.5, "beside": 0.5, "control": 0.25}
"""Seconds in which the victim is timed. The control is shorter: what it has to show is large."""
GAP = 0.2
"""Seconds before a phase: what an aggressor left in a queue ends meanwhile, and the next one has begun."""
RECOVERY = 0.25
"""Seconds more after a control, which leaves the victim's own requests waiting behind each other."""
AHEAD = 0.1
"""Seconds before a phase from which its aggressor runs."""
START = 1.2
"""Seconds that a pair costs besides its phases: load processes are started, and an interval is computed."""
FEWEST, USUAL = 3, 4
"""Rounds of a pair below which another pair is left out, and from which another kind of aggressor is added."""
LEAST = 2
"""Rounds of the first pair, which is tried however little time there is."""
ROUND = sum(WINDOWS.values()) + len(PHASES) * GAP + RECOVERY
"""Seconds of a round of one kind."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A victim and an aggressor, by name."""

    victim: str
    aggressor: str

    def __str__(self) -> str:
        return f"{self.victim} beside {self.aggressor}"


@dataclass(frozen=True, slots=True)
class Step:
    """One phase of a pair: the kind of aggressor, and from when to when the victim is timed, in seconds from the start."""

    round: int
    kind: str
    which: Which
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Plan:
    """`rounds` of each of `pairs`, beside `kinds` of aggressor; `left_out` are pairs for which there is no time."""

    pairs: tuple[Pair, ...]
    left_out: tuple[Pair, ...]
    kinds: Mapping[Pair, tuple[str, ...]]
    rounds: int

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        return sum(START + self.rounds * ROUND * len(self.kinds[pair]) for pair in self.pairs)


def pairs(tenants: Mapping[str, str], only: str | None = None) -> list[Pair]:
    """Every victim with every aggressor, so that the first ones have each victim once; `tenants` are devices by name.

    Neighbours of the same device come first.
    """
    names, found = list(tenants), []
    for distance in range(1, len(names)):
        found += [Pair(name, names[(at + distance) % len(names)]) for at, name in enumerate(names)]
    found.sort(key=lambda pair: tenants[pair.victim] != tenants[pair.aggressor])
    return [pair for pair in found if only in (None, pair.victim)]


def near(tenants: Mapping[str, str], only: str | None = None) -> list[Pair]:
    """Those of `pairs` that are on one device."""
    return [pair for pair in pairs(tenants, only) if tenants[pair.victim] == tenants[pair.aggressor]]


def plan(wanted: Sequence[Pair], possible: Mapping[str, Sequence[str]], seconds: float, usual: int = USUAL) -> Plan:
    """As many of these pairs as there is time for, and then as many kinds, with `usual` rounds of each, and rounds.

    `possible` are the kinds that each aggressor can be, the most important first.
    """
    fits = max(1, int(seconds / (START + FEWEST * ROUND)))
    chosen, left_out = tuple(wanted[:fits]), tuple(wanted[fits:])
    each = seconds / max(1, len(chosen)) - START
    most = next(number for number in count(1) if usual * ROUND * (number + 1) > each)
    kinds = {pair: tuple(possible[pair.aggressor][:most]) for pair in chosen}
    widest = max((len(some) for some in kinds.values()), default=1)
    return Plan(chosen, left_out, kinds, max(LEAST, int(each / (ROUND * widest))))


def needed(wanted: Sequence[Pair]) -> float:
    """Seconds in which every pair is tried."""
    return len(wanted) * (START + FEWEST * ROUND)


def steps(kinds: Sequence[str], rounds: int) -> list[Step]:
    """The phases of a pair: alone, beside, control, again and again, so that what changes on the machine meets all alike."""
    found: list[Step] = []
    at = GAP
    for turn in range(rounds):
        for kind in kinds:
            for which in PHASES:
                found.append(Step(turn, kind, which, at, at + WINDOWS[which]))
                at += WINDOWS[which] + GAP + (RECOVERY if which == "control" else 0.0)
    return found


class Span(Protocol):
    """From when to when a phase is, in seconds from the start."""

    @property
    def begin(self) -> float: ...

    @property
    def end(self) -> float: ...


def by_phase(spans: Sequence[Span], samples: Samples) -> list[Samples]:
    """The requests that were due in each of these phases, which are in order and do not overlap.

    A phase in which the server had too much to do, such as a control, leaves requests waiting. What was due in the next phase
    before the last of them was answered is left out: it waited for them, and for nothing that its own phase is about.
    """
    every = merged([samples])
    rows = list(zip(every.due, every.latency, every.status, strict=True))
    found, clear = [], 0.0
    for span in spans:
        mine = [row for row in rows if span.begin <= row[0] < span.end]
        kept = Samples()
        for row in mine:
            if row[0] >= clear:
                kept.add(*row)
        found.append(kept)
        clear = max((due + latency / 1e6 for due, latency, _ in mine), default=0.0)
    return found
