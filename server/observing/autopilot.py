"""Decides which granules should change hands, from what each tenant of one device needs and the p99 that it is to keep.

Pure: the caller measures, carries out, and says what time it is. What would happen with more or fewer granules is computed as
for a queue with one server (M/M/1) whose runs take longer in proportion as granules are fewer. That is too pessimistic for most
models, so what it says a tenant can do without, it can. Where it is wrong the other way the move is undone, and not made again
for a time that doubles each time.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .need import Need

KEEPS = 0.8
"""Share of the target that a p99 should be at most after a move, so that it is not missed at once."""
FULL = 0.7
"""Share of the time that a partition should be busy at most after it gave granules away."""
_SOME, _MOST = 0.01, 0.5
"""More works than the first part of the requests were held: the p99 may be theirs. More than the second: so is the load."""
_LOAD_GROWN, _HELPED = 1.2, 0.9
"""More granules did not help if the rate of answers did not grow by the first, and the p99 did not fall below the second."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a tenant is to keep: a p99 in seconds, if any, and the fewest granules that it may have.

    With a ladder, its share changes between these widths only. `most` is the most granules that it may have.
    """

    target: float | None
    least: int
    ladder: tuple[int, ...] = ()
    most: int | None = None

    def widths(self, above: int, most: int) -> Iterator[int]:
        """Its possible shares above the first number and up to the second, ascending."""
        most = most if self.most is None else min(most, self.most)
        allowed = self.ladder or range(self.least, most + 1)
        return (width for width in allowed if max(above + 1, self.least) <= width <= most)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between two measurements, and how long things take; see docs/operations/shares.md."""

    period: float = 5.0
    window: float = 15.0
    """What is measured at a time. After a move nothing is decided for so long."""
    patience: int = 2
    """Measurements in a row that have to miss the target."""
    calm: int = 12
    """Measurements in a row in which a tenant can do without what is not of its own share, before that goes back."""
    bar: float = 300.0
    """For how long a move that was undone, refused or of no use is not made again. Doubles each time."""
    most_bar: float = 3600.0
    after_operator: float = 300.0
    """For how long nothing is moved after an operator did."""


@dataclass(frozen=True, slots=True)
class Step:
    """A move of granules: the shares that change, the reason as the rest of a sentence that begins with "moved"."""

    counts: Mapping[str, int]
    receiver: str
    giver: str | None
    """None where only free granules are given."""
    reason: str


@dataclass(slots=True)
class _Bars:
    """Moves that are not made for now, by what they are, and how often in a row that has been so."""

    until: dict[object, float] = field(default_factory=dict)
    times: dict[object, int] = field(default_factory=dict)

    def put(self, what: object, now: float, pace: Pace) -> None:
        if now > self.until.get(what, -math.inf) + pace.most_bar:
            self.times.pop(what, None)
        times = self.times.get(what, 0)
        self.times[what] = times + 1
        self.until[what] = now + min(pace.bar * 2**times, pace.most_bar)

    def holds(self, what: object, now: float) -> bool:
        return now < self.until.get(what, -math.inf)


class Autopilot:
    """The decisions for one device. `goals` are those of the tenants that may be moved; all others keep what they have.

    `own` are the shares that tenants have by the configuration or by an operator. Times are seconds on any clock.
    """

    def __init__(
        self, goals: Mapping[str, Goal], own: Mapping[str, int], unit: str = "granule", pace: Pace | None = None
    ) -> None:
        self.goals = dict(goals)
        self.own = dict(own)
        self.notes: list[str] = []
        """Why nothing was moved at the last decision, a sentence for each tenant that misses its target."""
        self._unit = unit
        self._pace = pace or Pace()
        self._missing: dict[str, int] = {}
        self._calm: dict[str, int] = {}
        self._made: dict[tuple[str, str], float] = {}
        """When granules last went from the first tenant to the second."""
        self._bars = _Bars()
        self._gained: dict[str, tuple[float, float]] = {}
        """The p99 and the rate of a tenant before it was last given granules."""

    def decide(self, now: float, total: int, held: Mapping[str, int], needs: Mapping[str, Need]) -> Step | None:
        """The next move, if there should be one. `held` are the granules of every tenant, `needs` is empty after a move until
        there is a whole window again.
        """
        view = _View(self.goals, self.own, total, held, needs)
        self.notes = []
        for name in self.goals:
            self._missing[name] = self._missing.get(name, 0) + 1 if view.misses(name) else 0
            self._calm[name] = self._calm.get(name, 0) + 1 if view.can_return(name) else 0
        late = [name for name in self.goals if self._missing[name] >= self._pace.patience]
        for name in sorted(late, key=lambda name: (held[name] >= self.own[name], -view.miss(name), name)):
            if step := self._give(now, name, view):
                return step
        return self._return(view) if needs else None

    def moved(self, now: float, step: Step, needs: Mapping[str, Need]) -> None:
        """This step was made; `needs` are those that it was decided with."""
        self._missing.clear()
        self._calm.clear()
        if before := needs.get(step.receiver):
            self._gained[step.receiver] = (before.p99 or 0.0, before.rate)
        if step.giver is None:
            return
        back = (step.receiver, step.giver)
        if now - self._made.get(back, -math.inf) <= self._pace.bar * 2 ** (1 + self._bars.times.get(back, 0)):
            self._bars.put(back, now, self._pace)  # It was undone soon, so it was wrong.
        self._made[step.giver, step.receiver] = now

    def refused(self, now: float, step: Step) -> None:
        """This step could not be made."""
        self._bars.put((step.giver, step.receiver), now, self._pace)

    def _give(self, now: float, name: str, view: "_View") -> Step | None:
        """A move that gives this tenant granules. Notes why there is none."""
        what = view.missing(name)
        before = self._gained.get(name)
        if before and view.useless(name, *before):
            self._bars.put(name, now, self._pace)
            self._gained.pop(name)
        if self._bars.holds(name, now):
            self.notes.append(f"{name} misses its target ({what}), and more {self._unit}s did not help")
            return None
        if not any(self.goals[name].widths(view.held[name], view.total)):
            self.notes.append(f"{name} misses its target ({what}), and has the most that it may have: {view.held[name]}")
            return None
        below = view.held[name] < self.own[name]
        if view.held_back(name) and not below:
            held = f"{view.needs[name].held} of its works waited for its `pcie` or ran narrow for its `memory_bandwidth`"
            self.notes.append(f"{name} misses its target ({what}), but {held}: more {self._unit}s change neither")
            return None
        givers = [giver for giver in self.goals if giver != name and not self._bars.holds((giver, name), now)]
        found = None if self._bars.holds((None, name), now) else view.grant(name, givers, forced=False)
        if not found and below:  # Its own share is its own, whatever the others would do with it.
            found = view.grant(name, [giver for giver in self.goals if giver != name], forced=True)
        if not found:
            self.notes.append(f"{name} misses its target ({what}), but {self._no_giver(now, name, view)}")
            return None
        width, giver, left = found
        own = f", which has {view.held[name]} of its own {self.own[name]}" if below else ""
        to = f"{name} ({what}){own}"
        return self._step(view, name, width, giver, left, to, back=below and giver is not None)

    def _return(self, view: "_View") -> Step | None:
        """A move that gives a tenant what is missing of its own share, as no other tenant needs it any more."""
        for name in sorted(self.goals):
            if view.held[name] < self.own[name] and self.goals[name].least <= self.own[name]:
                givers = [giver for giver in self.goals if self._calm[giver] >= self._pace.calm]
                if found := view.grant(name, givers, forced=False, most=self.own[name]):
                    to = f"{name}, which has {view.held[name]} of its own {self.own[name]}"
                    return self._step(view, name, *found, to, back=True)
        return None

    def _step(self, view: "_View", name: str, width: int, giver: str | None, left: int, to: str, back: bool) -> Step:
        taken = width - view.held[name]
        given = view.held[giver] - left if giver else 0
        free = max(0, taken - given)
        if giver is None:
            reason = f"{self._count(taken, 'free ')} to {to}"
        elif free:
            reason = f"{self._count(taken)} to {to}: {free} free, {given} from {giver} ({view.about(giver)})"
        else:
            reason = f"{self._count(given)} {'back ' * back}from {giver} ({view.about(giver)}) to {to}"
        return Step({name: width, **({giver: left} if giver else {})}, name, giver, reason)

    def _count(self, number: int, kind: str = "") -> str:
        return f"{number} {kind}{self._unit}{'s' * (number != 1)}"

    def _no_giver(self, now: float, name: str, view: "_View") -> str:
        """Why no other tenant gives this one anything."""
        others = [other for other in self.goals if other != name]
        if not others:
            return f"there is no other tenant with a target or min_granules, and no free {self._unit}"
        return "; ".join(
            f"{other} was asked not long ago" if self._bars.holds((other, name), now) else view.why_not(other, self._unit)
            for other in others
        )


@dataclass(frozen=True, slots=True)
class _View:
    """One moment: who has how many granules, and needs what."""

    goals: Mapping[str, Goal]
    own: Mapping[str, int]
    total: int
    held: Mapping[str, int]
    needs: Mapping[str, Need]

    @property
    def free(self) -> int:
        return self.total - sum(self.held.values())

    def misses(self, name: str) -> bool:
        """Whether the tenant misses its target."""
        target, need = self.goals[name].target, self.needs.get(name)
        if target is None or need is None:
            return False
        return need.turned_away > 0 or need.misses(target)

    def miss(self, name: str) -> float:
        """By what factor it misses its target."""
        return (self.needs[name].p99 or 0.0) / (self.goals[name].target or math.inf)

    def missing(self, name: str) -> str:
        """How it misses its target, such as "p99 9 ms of 5 ms, queue 6 ms"."""
        need = self.needs[name]
        p99 = [f"p99 {time_text(need.p99)} of {time_text(self.goals[name].target or 0.0)}"] if need.p99 is not None else []
        refused = [f"{need.turned_away} refused or too late"] if need.turned_away else []
        return ", ".join([*p99, f"queue {time_text(need.queue)}", *refused])

    def held_back(self, name: str) -> bool:
        """Whether it may miss its target only because its shares of bandwidth hold its works."""
        need = self.needs[name]
        return need.held > (_SOME if need.busy <= FULL else _MOST) * need.requests

    def about(self, name: str) -> str:
        """What it needs, such as "12 % busy, p99 1.1 ms of 5 ms"."""
        need, target = self.needs.get(name), self.goals[name].target
        if need is None:
            return "not measured"
        if not need.requests:
            return f"{100 * need.busy:.0f} % busy, no request answered" if need.busy else "no requests"
        of = f" of {time_text(target)}" if target is not None else ""
        return f"{100 * need.busy:.0f} % busy, p99 {time_text(need.p99 or 0.0)}{of}"

    def predicted(self, name: str, width: int) -> tuple[float, float]:
        """How busy it would be with so many granules, and its p99."""
        return self.needs[name].with_share(width / self.held[name])

    def spares(self, name: str, width: int) -> bool:
        """Whether it would still keep its target with so few granules."""
        goal, need = self.goals[name], self.needs.get(name)
        if need is None or need.turned_away or width < goal.least:
            return False
        busy, p99 = self.predicted(name, width)
        return busy <= FULL and (goal.target is None or p99 <= KEEPS * goal.target)

    def can_return(self, name: str) -> bool:
        """Whether it has more than its own share, and could do without."""
        return self.held[name] > self.own[name] and self.spares(name, self.held[name] - 1)

    def useless(self, name: str, p99: float, rate: float) -> bool:
        """Whether the tenant's last granules were of no use: since then no more requests were answered, and no sooner."""
        need = self.needs[name]
        return need.rate <= _LOAD_GROWN * rate and (need.p99 or 0.0) > _HELPED * p99 > 0

    def wanted(self, name: str) -> int:
        """The smallest share with which it would keep its target, at most twice what it has."""
        held, target = self.held[name], self.goals[name].target or math.inf
        widths = list(self.goals[name].widths(held, self.total))
        for width in widths:
            busy, p99 = self.predicted(name, width)
            if width >= 2 * held or (p99 <= KEEPS * target and busy <= FULL):
                return width
        return widths[-1] if widths else held

    def grant(self, name: str, givers: list[str], forced: bool, most: int | None = None) -> tuple[int, str | None, int] | None:
        """A share for this tenant, who gives for it, and what the giver is left with; as much as can be had.

        Free granules come first. `forced`: from givers that have more than their own share, also if they need it, but no more
        than the tenant's own share.
        """
        limit = self.own[name] if forced else self.wanted(name) if most is None else most
        for width in sorted(self.goals[name].widths(self.held[name], limit), reverse=True):
            missing = width - self.held[name] - self.free
            if missing <= 0:
                return width, None, 0
            found = [(giver, left) for giver in givers if (left := self._left(giver, missing, forced)) is not None]
            if found:
                giver, left = min(
                    found, key=lambda each: (self.held[each[0]] <= self.own[each[0]], self._strain(*each), each[0])
                )
                return width, giver, left
        return None

    def _left(self, giver: str, missing: int, forced: bool) -> int | None:
        """The largest share that this giver can be left with when it gives so many granules or more."""
        goal, held = self.goals[giver], self.held[giver]
        for left in sorted(goal.widths(0, held - missing), reverse=True):
            if left >= self.own[giver] if forced else self.spares(giver, left):
                return left
        return None

    def _strain(self, giver: str, left: int) -> float:
        """How close to its limits a giver would be; what decides among several."""
        if giver not in self.needs:
            return math.inf
        busy, p99 = self.predicted(giver, left)
        return max(busy / FULL, p99 / (KEEPS * (self.goals[giver].target or math.inf)))

    def why_not(self, name: str, unit: str) -> str:
        """Why this tenant gives nothing."""
        goal, held = self.goals[name], self.held[name]
        if name not in self.needs:
            return f"{name} is not measured"
        lower = list(goal.widths(0, held - 1))
        if not lower:
            return f"{name} has its minimum of {held} {unit}{'s' * (held != 1)}"
        if self.spares(name, lower[-1]):
            return f"{name} alone cannot give enough for a step of its ladder"
        if self.needs[name].turned_away:
            return f"{name} refuses requests itself"
        busy, p99 = self.predicted(name, lower[-1])
        of = f" of {time_text(goal.target)}" if goal.target is not None else ""
        return f"{name} would be {min(100.0, 100 * busy):.0f} % busy with {lower[-1]}, p99 about {time_text(p99)}{of}"


def time_text(seconds: float) -> str:
    """A time for people: 1.1 ms, 250 us, 2 s."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
