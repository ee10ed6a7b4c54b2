"""Simulated tenants of one device on a virtual clock, a queue with one server each (M/G/1), and the autopilot over them."""

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from server.observing.autopilot import Autopilot, Goal, Pace, Step
from server.observing.need import Counted, History
from server.tenants.statistics import BOUNDS

Rate = Callable[[float], float]
"""Requests a second at a time in seconds."""


@dataclass
class Queue:
    """A tenant. A run takes `work` seconds on one granule; `serial` is the share of it that granules do not shorten."""

    rate: Rate
    work: float
    serial: float = 0.2
    free_at: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (2 + len(BOUNDS) + 1))
    ran: int = 0

    def run(self, since: float, until: float, granules: int, chance: random.Random) -> None:
        """Serve what arrives in this time. Requests that end later are counted now: a busy queue is noticed early."""
        now = since
        while (rate := self.rate(now)) > 0 and (now := now + chance.expovariate(rate)) < until:
            mean = self.work * (self.serial + (1 - self.serial) / granules)
            took = mean * (0.5 + 0.5 * chance.expovariate(1.0))
            begins = max(now, self.free_at)
            self.free_at = begins + took
            self.counts[0] += 1
            self.counts[1] += int((begins - now) * 1e9)
            self.ran += int(took * 1e9)
            self.counts[2 + bisect_left(BOUNDS, (self.free_at - now) * 1e9)] += 1

    def counted(self, at: float) -> Counted:
        return Counted(at, {("model", "1"): tuple(self.counts)}, 0, ran=self.ran)


@dataclass
class Site:
    """A device of `total` granules, its tenants, and what was moved when."""

    total: int
    queues: Mapping[str, Queue]
    goals: Mapping[str, Goal]
    held: dict[str, int]
    pace: Pace = field(default_factory=Pace)
    moves: list[tuple[float, Step]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.pilot = Autopilot(self.goals, self.held, "core", self.pace)
        self.history = History(self.pace.window)
        self.chance = random.Random(1)

    def run(self, seconds: float) -> "Site":
        until = self.now + seconds
        while self.now < until:
            then = self.now + self.pace.period
            for name, queue in self.queues.items():
                queue.run(self.now, then, self.held[name], self.chance)
                self.history.add(name, queue.counted(then))
            self.now = then
            needs = self.history.needs()
            if step := self.pilot.decide(self.now, self.total, self.held, needs):
                self.pilot.moved(self.now, step, needs)
                self.held |= step.counts
                self.moves.append((self.now, step))
                self.history.forget()
            assert sum(self.held.values()) <= self.total
        return self

    @property
    def reasons(self) -> list[str]:
        return [step.reason for _, step in self.moves]


def constant(rate: float) -> Rate:
    return lambda _: rate


def between(start: float, end: float, high: float, low: float) -> Rate:
    """One rate in this time, another one before and after."""
    return lambda now: high if start <= now < end else low
