"""Which models slow the works of other tenants of their device, whatever they move: found by trying. Pure.

A model of a fenced tenant is suspected if works of another tenant take longer while it runs at home than without it. That may
have other reasons: more load makes larger batches, and loads rise together. So it is tried: let go and held in turn, and found
to slow others only if works of one neighbour took longer in all phases in which it was let go than in any in which it was held.
A model that is suspected for another reason is mostly held once, for some seconds, before that is known.

Held means on a single granule: a neighbour of random reads takes 0.66 ms beside one granule, 2.5 beside two, 3.7 beside seven
(H100, docs/lab/2026-11-28-sleep.md).
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from .usage import NS, DeviceTotals, Row

TIMES = 1.5
"""How many times as long works have to take. The clock of a GPU at its power limit alone makes it up to 1.4."""
WINDOW = NS * 8 // 10
"""A window is at least so long."""
BUSY, RESTS = 0.2, 0.02
"""A model may be tried if it runs for this part of a window at least; below the second part it counts as resting."""
FEW, LEAST = 5, 20
"""Works of a neighbour in a window that may be a reason to suspect a model, and in a phase of a trial."""
PHASES, AGAIN = 8, 3
"""Of a trial, in which a model is held every other time; and of one of a model that was found before and is tried again."""
MOST, IDLE, PAUSE = 12, 120, 5
"""Windows of a phase; others in which neighbours or the model rest; and after how many all is as before until they work."""
PATIENCE, SLOW = 60, 30
"""Windows beside a neighbour that was never seen without such models, until one is tried; a window that is slow is so many."""
WAIT, LONGEST = 60 * NS, 3600 * NS
"""From a trial in which nothing was found to the next one: twice as long each time."""
KEEPS = 900 * NS
"""Then a model that was found is let go once, for some seconds."""
ASKED = 30
"""Windows for which a single granule is asked for, without those in which it is made, until a trial begins there."""
FEWER = 0.8
"""A neighbour with fewer works while a model is held, as a part, was asked less, so that its batches may have been smaller."""


class Ran(NamedTuple):
    """Works of a model that ended, and the nanoseconds that they took together."""

    works: int
    ns: float


class Harm:
    """Of one device. `random` makes the phases of trials differ, so that no neighbour's load keeps step with them."""

    def __init__(self, random: Random | None = None) -> None:
        self.found: dict[Row, float] = {}
        """Models that slow others, and how many times as long those take at least."""
        self._random = random or Random()
        self._since: dict[Row, int] = {}
        """When a model was found, or seen again to slow others."""
        self._quiet: dict[Row, float] = {}
        """Nanoseconds that a work takes while no model that could be held runs at home elsewhere, on average."""
        self._seen: dict[Row, int] = {}
        self._waits: dict[Row, _Wait] = {}
        self._asked: dict[str, int] = {}
        """Tenants whose models are to be tried, and for how many windows more the single granule is asked for."""
        self._fair: dict[Row, Row] = {}
        """Neighbours that may slow a model, too, which was found to slow them."""
        self._trial: _Trial | None = None
        self._last: _Look | None = None

    @property
    def held(self) -> set[Row]:
        """Models to hold from now on: all that were found, except what the running trial lets go, and what that trial holds."""
        held = dict.fromkeys(self.found, True)
        if self._trial:
            held |= self._trial.states
        return {row for row, is_held in held.items() if is_held}

    @property
    def single(self) -> set[str]:
        """Tenants whose narrow placements are to have a single granule: others would not show, or not do."""
        return {tenant for tenant, _ in (*self.found, *(self._trial.states if self._trial else ()))} | self._asked.keys()

    def look(self, totals: DeviceTotals, now: int, narrow: Mapping[Row, bool], granules: Mapping[str, int]) -> None:
        """The device's totals are so at this time in nanoseconds, and `narrow` says of each model that could be held whether
        it is: whether its works run on its narrow placement while others are at work. Others are not tried, and forgotten.
        `granules` says how many the narrow placement of each tenant has that is to have one; 0 while it is made.
        """
        before = self._last
        if before and now - before.at < WINDOW:
            return
        self._last = _Look(totals, now, dict(narrow))
        if before is None:
            return
        window = _Window(before, self._last)
        asked = {tenant: left - (granules.get(tenant) != 0) for tenant, left in self._asked.items()}
        self._asked = {tenant: left for tenant, left in asked.items() if left}
        self._forget(window, now)
        self._learn(window, {tenant for tenant, count in granules.items() if not count})
        if self._trial:
            self._go_on(self._trial, window, now)
        if self._trial is None:
            self._suspect(window, now, {tenant for tenant, count in granules.items() if count == 1})

    def _forget(self, window: "_Window", now: int) -> None:
        """What is known of models that cannot be held any more, or whose tenants have other shares. A model whose narrow
        placement is only made again was not tried for nothing less often, and is still suspected if it is to be tried there.
        """
        for known in (self.found, self._since, self._seen, self._waits, self._fair):
            for row in [row for row in known if row not in window.same]:
                asked = (known is self._seen or known is self._waits) and row[0] in self._asked
                waits = known is self._waits and self._waits[row].until > now - LONGEST
                if not (asked or waits) or row[0] not in window.shares:
                    del known[row]
        if self._trial and not self._trial.states.keys() <= window.same:
            self._trial = None

    def _learn(self, window: "_Window", unheld: Collection[str]) -> None:
        """What works take without what may slow them, as a model of an `unheld` tenant may."""
        could = window.same | {row for row in window.busy if row[0] in unheld}
        at_home = {row for row in could if not window.states.get(row) and window.busy.get(row, 0.0) > RESTS}
        for row, ran in window.ran.items():
            if ran.works >= FEW and all(other[0] == row[0] for other in at_home):
                each = ran.ns / ran.works
                self._quiet[row] = each + (self._quiet.get(row, each) - each) * 0.75

    def _suspect(self, window: "_Window", now: int, single: set[str]) -> None:
        """Begin to try a model for which there is a reason."""
        reasons = {row: self._slowed(row, window) for row in window.at_home() if row not in self.found}
        for row, reason in reasons.items():
            if reason:
                self._seen[row] = self._seen.get(row, 0) + max(reason.values())
            elif any(other[0] != row[0] and ran.works >= FEW for other, ran in window.ran.items()):
                self._seen[row] = 0
        due = [
            row
            for row in reasons
            if reasons[row] and self._seen[row] >= PATIENCE and now >= self._waits.get(row, _Wait()).until
        ]
        if due:
            row = max(due, key=lambda each: window.busy[each])
            tries = self._waits.get(row, _Wait()).tries
            # If two do, neighbours may be as slow with one of them: every other time the rest is held meanwhile.
            beside = dict.fromkeys(window.at_home() if tries % 2 else (), True)
            self._begin(_Trial(row, False, PHASES, beside, reasons[row], self._random), single)
            return
        for row, victim in self._fair.items():
            if row in window.at_home() and window.busy.get(victim) and now >= self._waits.get(row, _Wait()).until:
                self._begin(_Trial(row, False, PHASES, {victim: False}, [victim], self._random), single)
                return
        for row, since in self._since.items():
            victims = [other for other, ran in window.ran.items() if other[0] != row[0] and ran.works >= FEW]
            if now - since >= KEEPS and window.states.get(row) and victims:
                self._begin(_Trial(row, True, AGAIN, {}, victims, self._random), single)
                return

    def _begin(self, trial: "_Trial", single: set[str]) -> None:
        """Begin it, or ask for the single granules first that it takes."""
        tenants = {tenant for tenant, _ in trial.states}
        if tenants <= single:
            self._trial = trial
        self._asked |= dict.fromkeys(tenants - single, ASKED)

    def _slowed(self, row: Row, window: "_Window") -> dict[Row, int]:
        """Neighbours that this model may slow, and as how many windows that counts."""
        found = {}
        for other, ran in window.ran.items():
            if other[0] != row[0] and ran.works >= FEW:
                quiet = self._quiet.get(other)
                if quiet is None or ran.ns >= TIMES * quiet * ran.works:
                    found[other] = 1 if quiet is None else SLOW
        return found

    def _go_on(self, trial: "_Trial", window: "_Window", now: int) -> None:
        trial.add(window)
        row, wait = trial.row, self._waits.get(trial.row, _Wait())
        if trial.verdict is None:
            return
        self._trial = None
        self._seen[row] = 0
        if trial.verdict != "unclear":
            self._fair.pop(row, None)
        if trial.verdict == "unclear":
            self._waits[row] = wait._replace(until=now + WAIT)
            if row in self.found:
                self._since[row] = now
        elif trial.verdict == "innocent":
            self._waits[row] = _Wait(now + wait.next, min(2 * wait.next, LONGEST), wait.tries + 1)
            self.found.pop(row, None)
            self._since.pop(row, None)
        else:
            self.found[row], self._since[row] = max(trial.slowed.values()), now
            self._fair |= {other: row for other in trial.slowed if other in window.same and other not in self.found}


class _Wait(NamedTuple):
    """When a model may be tried again, how long after the next trial, and how often it was tried for nothing."""

    until: int = 0
    next: int = WAIT
    tries: int = 0


class _Look(NamedTuple):
    totals: DeviceTotals
    at: int
    narrow: Mapping[Row, bool]


class _Window:
    """What ran between two looks."""

    def __init__(self, before: _Look, now: _Look) -> None:
        self.ns = now.at - before.at
        self.busy: dict[Row, float] = {}
        """The part of the window in which a model ran, or less if it ran narrow."""
        self.ran: dict[Row, Ran] = {}
        """Works that ran at home alone, while no other tenant ran there."""
        tenants = now.totals.less(before.totals).tenants
        self.shares = {
            name: each.share
            for name, each in tenants.items()
            if each.share and name in before.totals.tenants and before.totals.tenants[name].share == each.share
        }
        """Of tenants that have the same as before."""
        self.same = {row for row in now.narrow if row[0] in self.shares}
        """Models that could be held, of tenants with the same shares as before."""
        self.states = {row: now.narrow[row] for row in self.same if before.narrow.get(row) is now.narrow[row]}
        """Whether each of these was held. Models whose state changed during the window are left out."""
        for name, share in self.shares.items():
            for model, each in tenants[name].models.items():
                row = name, model
                self.busy[row] = each.used / share / self.ns
                at_home = row not in now.narrow or self.states.get(row) is False
                lending = (
                    each.borrowed or tenants[name].lent
                )  # Else what borrows would be held, which its lender's `lend` bounds.
                if each.works > 0 and each.used > 0 and not lending and at_home and "/" in model:  # Not a strain.
                    self.ran[row] = Ran(each.works, each.used / share)

    def at_home(self) -> list[Row]:
        """Models that could be held, and ran at home."""
        return [row for row, is_held in self.states.items() if not is_held and self.busy.get(row, 0.0) >= BUSY]


@dataclass(slots=True)
class _Phase:
    held: bool
    length: int
    """Windows at least."""
    windows: int = 0
    idle: int = 0
    ns: int = 0
    ran: dict[Row, Ran] = field(default_factory=dict)


class _Trial:
    """Of one model, which is `held` at first or is not; `beside` are others that are held, or let go, all the time."""

    def __init__(
        self, row: Row, held: bool, count: int, beside: Mapping[Row, bool], victims: Iterable[Row], random: Random
    ) -> None:
        self.row = row
        self.verdict: str | None = None
        """Unclear, innocent or guilty; None while it goes on."""
        self.slowed = dict.fromkeys(victims, math.inf)
        """Neighbours that were slower whenever it was let go, and how many times as long their works took at least."""
        self._held = held
        self._beside = beside
        self._count = count
        self._random = random
        self._phases: list[_Phase] = []
        self._rested = 0
        """For how many windows its victims have."""
        self._begin(held)

    @property
    def states(self) -> dict[Row, bool]:
        """Whether it and others are to be held now. While its victims rest for longer all is as before."""
        resting = self._rested > PAUSE
        return {self.row: self._held} if resting else {**self._beside, self.row: self._phases[-1].held}

    def add(self, window: _Window) -> None:
        """It counts if all were as they have to be from its beginning to its end."""
        phase = self._phases[-1]
        as_wanted = all(window.states.get(row) is is_held for row, is_held in {**self._beside, self.row: phase.held}.items())
        self._rested = 0 if any(window.busy.get(row) for row in self.slowed) else self._rested + 1
        if as_wanted and not self._rested and (phase.held or window.busy.get(self.row, 0.0) >= BUSY):
            phase.windows += 1
            phase.ns += window.ns
            for row in self.slowed:
                before, more = phase.ran.get(row, Ran(0, 0)), window.ran.get(row, Ran(0, 0))
                phase.ran[row] = Ran(before.works + more.works, before.ns + more.ns)
        else:
            phase.idle += 1
        enough = phase.windows >= phase.length and all(phase.ran[row].works >= LEAST for row in self.slowed)
        if enough or phase.windows >= MOST or phase.idle >= IDLE:
            self._end()

    def _begin(self, held: bool) -> None:
        self._phases.append(_Phase(held, self._random.randint(1, 2)))

    def _end(self) -> None:
        """Judge by the phases so far, and at last once there are enough."""
        phase = self._phases[-1]
        times = {row: self._times(row) for row in self.slowed if row in phase.ran and phase.ran[row].works >= LEAST}
        self.slowed = {row: each for row, each in times.items() if each >= TIMES}
        if self.slowed and len(self._phases) >= self._count:
            self.slowed = {row: each for row, each in self.slowed.items() if self._as_many(row)}
            self.verdict = "guilty" if self.slowed else "innocent"
        elif self.slowed:
            self._begin(not phase.held)
        else:
            self.verdict = "innocent" if times else "unclear"

    def _times(self, row: Row) -> float:
        """How many times as long this neighbour's works took in any phase that let the model go as in any that held it."""
        let_go, held = (
            [p.ran[row].ns / p.ran[row].works for p in self._phases if p.held is is_held] for is_held in (False, True)
        )
        return min(let_go) / max(held) if let_go and held else math.inf

    def _as_many(self, row: Row) -> bool:
        """Whether this neighbour had about as many works in a second, or more, while the model was held: not fewer than by
        chance, of works that begin at random.
        """
        (let_go, ns), (held, held_ns) = (
            (sum(each.ran[row].works for each in phases), sum(each.ns for each in phases))
            for phases in ([each for each in self._phases if each.held is is_held] for is_held in (False, True))
        )
        part = FEWER * held_ns / ns
        return held >= part * let_go - 2 * math.sqrt(held + part * part * let_go)
