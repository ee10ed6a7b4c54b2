"""The phases of each turn, one after another: load processes run, and what came of them is kept as it was."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter, sleep

from greenlane.load.figures import Samples
from greenlane.load.jobs import Ask, ClosedLoop, OpenLoop, Tally
from greenlane.load.machine import Others
from greenlane.load.processes import poisson, run

from ..loads import together
from .plan import PHASES, Aggressor, Turn, Which
from .served import Server

SETTLE = 0.3
"""Seconds after each phase, in which a server gets rid of what is left of it."""
LOOK = 0.5
"""Seconds for which other programs have to be quiet before a phase."""
CONNECTIONS, MOST = 8, 64
"""Of the victim's client: those opened beforehand, and the most there may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`quiet` is the part of the cores' time that other programs may use; a phase in which they used more is tried again.

    `patience` is how many seconds may be spent in all on waiting for that, and on trying again.
    """

    victim: str
    aggressors: tuple[Aggressor, ...]
    victim_headers: Mapping[str, str]
    aggressor_headers: Mapping[str, str]
    rate: float
    rounds: int
    seconds: float
    quiet: float
    patience: float
    victim_cores: tuple[int, ...] | None = None
    aggressor_cores: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """What came of one phase.

    `late` is the p99 of the microseconds by which the victim's client itself sent late, `others` the part of the cores' time
    that other programs used (NaN: not known), `load` the machine's load average. `statuses` are the aggressor's answers.
    """

    turn: Turn
    attempt: int
    which: Which
    began: float
    samples: Samples
    late: float = math.nan
    others: float = math.nan
    load: float = 0.0
    statuses: Mapping[int, int] = field(default_factory=dict)


class Measurement:
    """Servers that are ready, and the settings. `run` does it all."""

    def __init__(self, settings: Settings, servers: Sequence[Server], report: Callable[[str], None]) -> None:
        self._settings = settings
        self._servers = {server.name: server for server in servers}
        self._kinds = {kind.name: kind for kind in settings.aggressors}
        self._known = all(server.command for server in servers)
        self._report = report
        self._left = settings.patience
        self._began = perf_counter()
        self._victims = {one.name: one.ask(settings.victim, settings.victim_headers) for one in servers}
        self._aggressors: dict[tuple[str, str], Ask] = {
            (one.name, kind.name): one.ask(kind.model, settings.aggressor_headers, kind.rows, kind.form)
            for one in servers
            for kind in settings.aggressors
        }

    def turn(self, turn: Turn) -> list[Phase]:
        """The phases of this turn, and before each its attempts that other programs disturbed. Blocks.

        Raises LoadProcessFailed.
        """
        return [phase for which in PHASES for phase in self._attempts(turn, which)]

    def _attempts(self, turn: Turn, which: Which) -> Iterator[Phase]:
        for attempt in count():
            self._wait()
            began = perf_counter()
            yield (phase := self._phase(turn, attempt, which))
            if self._left <= 0 or not disturbed(phase, self._settings.quiet):
                return
            self._report(f"{turn}, {which}: other programs used {phase.others:.0%} of the cores; again")
            self._left -= perf_counter() - began

    def _wait(self) -> None:
        """Until other programs leave the cores alone for a moment, or no time is left to wait for that."""
        while self._known and self._left > 0:
            others = self._others()
            sleep(LOOK)
            if others.share() <= self._settings.quiet:
                return
            self._left -= LOOK

    def _phase(self, turn: Turn, attempt: int, which: Which) -> Phase:
        jobs: list[OpenLoop | ClosedLoop] = []
        if which != "aggressor":
            jobs.append(self._victim(turn))
        if which != "alone":
            jobs.append(self._aggressor(turn))
        others, load = self._others(), os.getloadavg()[0]
        start, results = run(jobs)
        share = others.share()
        samples, tallies, late, *_ = together(results)
        sleep(SETTLE)
        return Phase(turn, attempt, which, start - self._began, samples, late, share, load, _statuses(tallies))

    def _victim(self, turn: Turn) -> OpenLoop:
        settings, server = self._settings, self._servers[turn.server]
        return OpenLoop(
            port=server.port,
            host=server.address,
            ask=self._victims[server.name],
            arrivals=poisson(settings.rate, settings.seconds, seed=turn.round),
            connections=CONNECTIONS,
            most=MOST,
            cores=settings.victim_cores,
        )

    def _aggressor(self, turn: Turn) -> ClosedLoop:
        settings, server, kind = self._settings, self._servers[turn.server], self._kinds[turn.aggressor]
        return ClosedLoop(
            name=kind.name,
            port=server.port,
            host=server.address,
            asks=(self._aggressors[server.name, kind.name],),
            connections=kind.connections,
            behaviour="churn" if kind.churn else "flood",
            seconds=settings.seconds,
            cores=settings.aggressor_cores,
        )

    def _others(self) -> Others:
        return Others(sorted(os.sched_getaffinity(0)), self._known)


def disturbed(phase: Phase, quiet: float) -> bool:
    """Whether other programs used more than that of the cores; not where that is not known."""
    return phase.others > quiet


def _statuses(tallies: Sequence[Tally]) -> dict[int, int]:
    found: dict[int, int] = {}
    for tally in tallies:
        for status, answers in tally.statuses.items():
            found[status] = found.get(status, 0) + answers
    return found
