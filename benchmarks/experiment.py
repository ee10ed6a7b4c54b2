"""The isolation experiment over HTTP: phases in turns, on servers that all run at the same time.

Alone and under load follow each other again and again, so that whatever else the machine does meets both alike. Where a fence
is compared with none, servers follow each other: each reads what its works move from a meter of the whole GPU. There victims
are asked one after another while one aggressor goes on, as the start of load processes takes as long as a phase.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, sleep

from greenlane.load.figures import merged
from greenlane.load.jobs import ClosedLoop, OpenLoop, Seen, Tally
from greenlane.load.processes import run
from greenlane.load.rules import BOUND

from .arrangement import AGGRESSOR, EVERYONE, QUARTERS, SHARED, SPLIT, VICTIM
from .asks import as_json, binary, truth, wrong
from .clients import Clients
from .kinds import KINDS, TRIO, TRIO_OF
from .loads import arrivals, share, together
from .verdicts import (
    ALONE,
    CONTROL,
    CONTROL_ALONE,
    CONTROL_OWN,
    CONTROL_WARMING,
    LEARNING,
    OWN,
    UNDER,
    UNKEPT,
    WARMING,
    Combination,
    Phase,
)

SETTLE = 0.2
"""Seconds between phases, in which a server gets rid of what an aggressor left behind."""
LEARNS = 4.0
"""Seconds of an aggressor alone where it is fenced, in which the server learns what its works move: NVML is read every two."""
TRIES = 35.0
"""Seconds of an aggressor beside a victim in which the server finds that it slows others, though it moves few bytes."""
WARMS = 2.0
"""Seconds for which each victim is asked on a server before anything counts, and before an aggressor is tried beside it."""
TURN = 0.1
"""Seconds between two victims that are asked while one aggressor goes on."""
SELDOM = 4
"""So many times less often victims are asked beside an aggressor that slows them most and that nothing holds, so that neither
their requests nor those of the next victim wait for each other."""
BETWEEN = 0.8
"""Seconds from the end of a phase to the beginning of the next, as a rule: load processes are started, and begin ahead."""
STARTS = 55.0
"""Seconds that building the models and starting two servers, one after another, take on a GPU besides, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an experiment: `victims` with their requests a second, `rows` the batch of the compute-heavy aggressor.

    `fence` is what holds the aggressor, in the control not; None where partitions are compared with none. With it there are
    `rounds` on the server that holds it, and one on the other.
    """

    victims: dict[str, float]
    kinds: tuple[str, ...]
    form: str = "binary"
    arrivals: str = "poisson"
    seconds: float = 1.0
    rounds: int = 3
    rows: int = 8
    processes: int = 1
    bound: float = BOUND
    control: bool = True
    fence: str | None = None
    learning: float = LEARNS
    trying: float = TRIES
    warming: float = WARMS
    clients: Clients = field(default_factory=Clients)

    def steps(self) -> "list[Step]":
        """All phases in order; every round begins with another aggressor."""
        if not self.fence:
            numbers = range(self.rounds)
            return [step for number in numbers for victim in self.victims for step in self._round(victim, number)]
        steps = [Step((), OWN, aggressor, 0) for aggressor in self.kinds]
        steps.append(Step(tuple(self.victims), WARMING, "", 0))
        # The victim alone first: a neighbour that was never seen without a hog is a reason to try it much later.
        steps += [Step(tuple(self.victims)[:1], LEARNING, each, 0) for each in self.kinds if KINDS[each].tried]
        steps += [step for number in range(self.rounds) for step in self._beside(number, ALONE, UNDER)]
        steps.append(Step(tuple(self.victims), CONTROL_WARMING, "", 0))
        steps += [Step((), CONTROL_OWN, aggressor, 0) for aggressor in self.kinds]
        return steps + list(self._beside(0, CONTROL_ALONE, CONTROL))

    @property
    def duration(self) -> float:
        """About how many seconds it takes, on servers that are ready."""
        return sum(self.whole(step) + BETWEEN for step in self.steps())

    def lasts(self, step: "Step") -> float:
        """The seconds of a phase: for which each of its victims is asked, or an aggressor alone goes on."""
        longer = {LEARNING: self.trying, WARMING: self.warming, CONTROL_WARMING: self.warming}
        if self.fence and step.kind == OWN and not KINDS[step.aggressor].mild:
            longer[OWN] = self.learning
        return max(longer.get(step.kind, 0.0), self.seconds)

    def whole(self, step: "Step") -> float:
        """The seconds of all victims of a phase together."""
        count = max(1, len(step.victims))
        return count * self.lasts(step) + (count - 1) * TURN

    def _round(self, victim: str, number: int) -> "Iterator[Step]":
        kinds = (ALONE, UNDER, CONTROL) if self.control else (ALONE, UNDER)
        if self.control:
            yield Step((victim,), CONTROL_ALONE, "", number)
        for aggressor in self._turned(number):
            yield from (Step((victim,), kind, aggressor, number) for kind in kinds)

    def _beside(self, number: int, alone: str, under: str) -> "Iterator[Step]":
        """A round on one server: the victims beside each aggressor, and alone before, in the middle and after."""
        victims = tuple(self.victims)
        kinds = [each for each in self._turned(number) if number == 0 or not KINDS[each].mild]
        for place, aggressor in enumerate(kinds):
            if place in (0, len(kinds) // 2):
                yield Step(victims, alone, "", number)
            yield Step(victims, under, aggressor, number)
        yield Step(victims, alone, "", number)

    def _turned(self, number: int) -> tuple[str, ...]:
        at = number % len(self.kinds)
        return *self.kinds[at:], *self.kinds[:at]


@dataclass(frozen=True, slots=True)
class Step:
    """One phase to come, of victims one after another; without any, of an aggressor alone."""

    victims: tuple[str, ...]
    kind: str
    aggressor: str
    round: int

    def __str__(self) -> str:
        return ": ".join(
            part for part in (f"round {self.round + 1}", ", ".join(self.victims), self.aggressor, self.kind) if part
        )


class Experiment:
    """Phases on servers that are ready, as the settings say: `run` on some at a time, then `combinations`."""

    def __init__(self, settings: Settings, report: Callable[[int, int, str], None]) -> None:
        self._settings = settings
        self._report = report
        self._began = 0.0
        self._done: list[tuple[Step, str, Phase]] = []
        self._bodies: list[tuple[str, Phase, list[bytes]]] = []

    @property
    def shows(self) -> bool:
        """Whether there is something to show: a victim was asked beside an aggressor that is held off."""
        return any(step.kind == UNDER for step, *_ in self._done)

    def run(self, ports: Mapping[str, int]) -> None:
        """Every phase on the servers of these names. Blocks.

        Raises LoadProcessFailed, and KeyboardInterrupt if SIGINT comes: the phases that were over then are kept.
        """
        plan = self._settings.steps()
        self._began = self._began or perf_counter()
        for number, step in enumerate(plan):
            if _server(step) in ports:
                self._report(number, len(plan), str(step))
                self._done += self._phases(step, ports[_server(step)])
                sleep(SETTLE)

    def combinations(self) -> list[Combination]:
        """What came of every victim and aggressor; all answers are compared with the models' first. Blocks."""
        self._check()
        done, settings = _one_a_round(self._done), self._settings
        found = [self._combination(victim, kind, done) for victim in settings.victims for kind in settings.kinds]
        return [each for each in found if each.of(UNDER)]

    def _phases(self, step: Step, port: int) -> list[tuple[Step, str, Phase]]:
        """A phase of each victim, or of the aggressor alone; the aggressor's rate is of all of them together."""
        aggressors = self._aggressors(port, step) if step.aggressor else []
        victims = [self._victim(port, step, number) for number in range(len(step.victims))]
        start, results = run([*aggressors, *(job for jobs in victims for job in jobs)])
        _, tallies, *_ = together(results)
        busy, found = _busy(tallies), []
        seen = iter(results[len(aggressors) :])
        for number, jobs in enumerate(victims or [[]]):
            mine: list[Seen | Tally] = [next(seen) for _ in jobs]
            samples, _, late, sizes, bodies = together(mine)
            phase = Phase(step.kind, step.round, start + self._begins(step, number) - self._began, samples, busy, late, sizes)
            found.append((step, step.victims[number] if jobs else "", phase))
            self._bodies += [(step.victims[number], phase, bodies)] if jobs else []
        return found if step.kind not in UNKEPT else []

    def _begins(self, step: Step, number: int) -> float:
        return number * (self._settings.lasts(step) + TURN)

    def _victim(self, port: int, step: Step, number: int) -> list[OpenLoop]:
        settings, victim = self._settings, step.victims[number]
        form = binary if settings.form == "binary" else as_json
        ask = form(victim, EVERYONE if self._in_one(step) else VICTIM)
        slowed = step.kind == CONTROL and settings.fence and KINDS[step.aggressor].tried
        rate = settings.victims[victim] / (SELDOM if slowed else 1)
        due = arrivals(settings.arrivals, rate, settings.lasts(step), seed=step.round)
        due = [self._begins(step, number) + at for at in due]
        count = 1 if settings.clients.victim else max(1, settings.processes // 2)
        shared = {"port": port, "ask": ask, "connections": 8 // count, "most": 64 // count}
        own = {"spin": bool(settings.clients.apart), "cores": settings.clients.victim or None}
        return [OpenLoop(arrivals=share(due, index, count), **shared, **own) for index in range(count)]  # type: ignore[arg-type]

    def _aggressors(self, port: int, step: Step) -> list[ClosedLoop]:
        settings = self._settings
        names = TRIO_OF if step.aggressor == TRIO else (step.aggressor,)
        found: list[ClosedLoop] = []
        for name in names:
            alone = f"{AGGRESSOR}-{name}" if step.aggressor == TRIO else AGGRESSOR
            tenant = EVERYONE if self._in_one(step) else alone
            cores = settings.clients.others or None
            found += KINDS[name].jobs(port, tenant, settings.whole(step), settings.rows, settings.processes, cores)
        return found

    def _in_one(self, step: Step) -> bool:
        """Whether victim and aggressor are one tenant."""
        return _server(step) == SHARED and not self._settings.fence

    def _check(self) -> None:
        """Compare the answers that were kept with the model's, now that nothing is measured any more."""
        wanted = {victim: truth(victim) for victim in self._settings.victims}
        for victim, phase, bodies in self._bodies:
            phase.wrong += wrong(bodies, self._settings.form, wanted[victim])

    def _combination(self, victim: str, kind: str, done: "Sequence[tuple[Step, str, Phase]]") -> Combination:
        mine = [each for each in done if each[1] in (victim, "") and each[0].aggressor in (kind, "")]
        beside = {(alone, step.round) for step, *_ in mine for under, alone in _BASES.items() if step.kind == under}
        phases = [phase for step, _, phase in mine if step.kind not in _BASES.values() or (step.kind, step.round) in beside]
        return Combination(victim, kind, tuple(phases), self._settings.bound)


_BASES = {UNDER: ALONE, CONTROL: CONTROL_ALONE}


def _one_a_round(done: "Sequence[tuple[Step, str, Phase]]") -> "list[tuple[Step, str, Phase]]":
    """With what a victim was asked alone several times in a round as one phase."""
    groups: dict[tuple[Step, str], list[Phase]] = {}
    for step, victim, phase in done:
        groups.setdefault((step, victim), []).append(phase)
    return [(step, victim, _joined(phases)) for (step, victim), phases in groups.items()]


def _joined(phases: Sequence[Phase]) -> Phase:
    if len(phases) == 1:
        return phases[0]
    samples, late = merged(phase.samples for phase in phases), max(phase.own for phase in phases)
    return replace(phases[0], samples=samples, own=late, wrong=sum(phase.wrong for phase in phases))


def _server(step: Step) -> str:
    if step.kind in (CONTROL, CONTROL_ALONE, CONTROL_OWN, CONTROL_WARMING):
        return SHARED
    return QUARTERS if step.aggressor == TRIO else SPLIT


def _busy(tallies: Sequence[Tally]) -> list[dict[str, object]]:
    """Throughput of the aggressors of one kind together: answers a second, by status, and megabytes a second."""
    names = dict.fromkeys(tally.name for tally in tallies)
    return [_sum(name, [tally for tally in tallies if tally.name == name]) for name in names]


def _sum(name: str, tallies: Sequence[Tally]) -> dict[str, object]:
    statuses: dict[int, int] = {}
    for tally in tallies:
        for status, count in tally.statuses.items():
            statuses[status] = statuses.get(status, 0) + count
    seconds = tallies[0].seconds
    megabytes = sum(tally.sent + tally.received for tally in tallies) / 1e6 / seconds
    return {"name": name, "rate": sum(t.answers for t in tallies) / seconds, "megabytes": megabytes, "statuses": statuses}
