"""The isolation experiment over HTTP: phases in turns, on servers that all run at the same time.

Alone and under load follow each other again and again, so that whatever else the machine does meets both alike. Where a fence
is compared with none, servers follow each other: each reads what its works move from a meter of the whole GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, sleep

from greenlane.load.jobs import ClosedLoop, OpenLoop, Tally
from greenlane.load.processes import run
from greenlane.load.rules import BOUND

from .arrangement import AGGRESSOR, EVERYONE, QUARTERS, SHARED, SPLIT, VICTIM
from .asks import as_json, binary, truth, wrong
from .clients import Clients
from .kinds import KINDS, TRIO, TRIO_OF
from .loads import arrivals, share, together
from .verdicts import ALONE, CONTROL, CONTROL_ALONE, CONTROL_OWN, LEARNING, OWN, UNDER, Combination, Phase

SETTLE = 0.2
"""Seconds between phases, in which a server gets rid of what an aggressor left behind."""
LEARNS = 4.5
"""Seconds of an aggressor alone where it is fenced, in which the server learns what its works move: NVML is read every two."""
TRIES = 35.0
"""Seconds of an aggressor beside a victim in which the server finds that it slows others, though it moves few bytes."""
BETWEEN = 0.8
"""Seconds from the end of a phase to the beginning of the next, as a rule: load processes are started, and begin ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an experiment: `victims` with their requests a second, `rows` the batch of the compute-heavy aggressor.

    `fence` is what holds the aggressor, in the control not; None where partitions are compared with none.
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
    clients: Clients = field(default_factory=Clients)

    def steps(self) -> "list[Step]":
        """All phases in order; every round begins with another aggressor."""
        numbers, servers = range(self.rounds), ((ALONE, OWN, UNDER), (CONTROL_ALONE, CONTROL_OWN, CONTROL))
        if not self.fence:
            return [step for number in numbers for victim in self.victims for step in self._round(victim, number)]
        learning = [Step("", LEARNING, aggressor, 0) for aggressor in self.kinds]
        if tried := [each for each in self.kinds if KINDS[each].tried]:
            # The victim alone first: a neighbour that was never seen without a hog is a reason to try it much later.
            learning += [Step(next(iter(self.victims)), LEARNING, each, 0) for each in ("", *tried)]
        return learning + [step for kinds in servers for number in numbers for step in self._one(number, *kinds)]

    @property
    def duration(self) -> float:
        """About how many seconds it takes, on servers that are ready."""
        return sum(self.lasts(step) + BETWEEN for step in self.steps())

    def lasts(self, step: "Step") -> float:
        """The seconds of a phase."""
        least = 0.0 if step.kind != LEARNING else self.trying if step.victim and step.aggressor else self.learning
        return max(least, self.seconds)

    def _round(self, victim: str, number: int) -> "Iterator[Step]":
        kinds = (ALONE, UNDER, CONTROL) if self.control else (ALONE, UNDER)
        if self.control:
            yield Step(victim, CONTROL_ALONE, "", number)
        for aggressor in self._turned(number):
            yield from (Step(victim, kind, aggressor, number) for kind in kinds)

    def _one(self, number: int, alone: str, own: str, under: str) -> "Iterator[Step]":
        """A round on one server: each victim alone, then each aggressor alone and beside each of them."""
        yield from (Step(victim, alone, "", number) for victim in self.victims)
        for aggressor in self._turned(number):
            yield Step("", own, aggressor, number)
            yield from (Step(victim, under, aggressor, number) for victim in self.victims)

    def _turned(self, number: int) -> tuple[str, ...]:
        at = number % len(self.kinds)
        return *self.kinds[at:], *self.kinds[:at]


@dataclass(frozen=True, slots=True)
class Step:
    """One phase to come."""

    victim: str
    kind: str
    aggressor: str
    round: int

    def __str__(self) -> str:
        return ": ".join(part for part in (f"round {self.round + 1}", self.victim, self.aggressor, self.kind) if part)


class Experiment:
    """Phases on servers that are ready, as the settings say: `run` on some at a time, then `combinations`."""

    def __init__(self, settings: Settings, report: Callable[[int, int, str], None]) -> None:
        self._settings = settings
        self._report = report
        self._began = 0.0
        self._done: list[tuple[Step, Phase]] = []
        self._bodies: list[tuple[str, Phase, list[bytes]]] = []

    @property
    def rounds(self) -> int:
        """How many are over on the servers that hold aggressors off, so that there is something to show."""
        return len({step.round for step, _ in self._done if step.kind == UNDER})

    def run(self, ports: Mapping[str, int]) -> None:
        """Every phase on the servers of these names. Blocks.

        Raises LoadProcessFailed, and KeyboardInterrupt if SIGINT comes: what was done in rounds that were over then is kept.
        """
        plan, before = self._settings.steps(), list(self._done)
        self._began = self._began or perf_counter()
        step = plan[0]
        try:
            for number, step in enumerate(plan):
                if _server(step) in ports:
                    self._report(number, len(plan), str(step))
                    phase = self._phase(step, ports[_server(step)])
                    if step.kind != LEARNING:
                        self._done.append((step, phase))
                    sleep(SETTLE)
        except KeyboardInterrupt:
            self._done = [*before, *((each, phase) for each, phase in self._done[len(before) :] if each.round < step.round)]
            raise

    def combinations(self) -> list[Combination]:
        """What came of every victim and aggressor; all answers are compared with the models' first. Blocks."""
        self._check()
        return [self._combination(victim, kind) for victim in self._settings.victims for kind in self._settings.kinds]

    def _phase(self, step: Step, port: int) -> Phase:
        jobs: list[OpenLoop | ClosedLoop] = [*self._victims(port, step)] if step.victim else []
        jobs += self._aggressors(port, step) if step.aggressor else []
        start, results = run(jobs)
        samples, tallies, late, sizes, bodies = together(results)
        phase = Phase(step.kind, step.round, start - self._began, samples, _busy(tallies), late, sizes)
        if step.victim:
            self._bodies.append((step.victim, phase, bodies))
        return phase

    def _victims(self, port: int, step: Step) -> list[OpenLoop]:
        settings = self._settings
        form = binary if settings.form == "binary" else as_json
        ask = form(step.victim, EVERYONE if self._in_one(step) else VICTIM)
        due = arrivals(settings.arrivals, settings.victims[step.victim], settings.lasts(step), seed=step.round)
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
            found += KINDS[name].jobs(port, tenant, settings.lasts(step), settings.rows, settings.processes, cores)
        return found

    def _in_one(self, step: Step) -> bool:
        """Whether victim and aggressor are one tenant."""
        return _server(step) == SHARED and not self._settings.fence

    def _check(self) -> None:
        """Compare the answers that were kept with the model's, now that nothing is measured any more."""
        wanted = {victim: truth(victim) for victim in self._settings.victims}
        for victim, phase, bodies in self._bodies:
            phase.wrong += wrong(bodies, self._settings.form, wanted[victim])

    def _combination(self, victim: str, kind: str) -> Combination:
        phases = tuple(phase for step, phase in self._done if step.victim in (victim, "") and step.aggressor in (kind, ""))
        return Combination(victim, kind, phases, self._settings.bound)


def _server(step: Step) -> str:
    if step.kind in (CONTROL, CONTROL_ALONE, CONTROL_OWN):
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
