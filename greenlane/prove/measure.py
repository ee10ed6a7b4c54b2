"""One pair measured: the victim in an open loop, and the aggressor of another tenant, or in its own, in turns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, sleep

from greenlane.load.figures import Figures, Samples, figures, merged, percentile
from greenlane.load.jobs import Ask, InTurn, OpenLoop, Seen, Tally
from greenlane.load.others import Others
from greenlane.load.processes import Job, LoadProcessFailed, begun
from greenlane.load.rules import Growth, Ruling, rule
from greenlane.load.schedule import poisson

from .attacks import Attack
from .errors import ServerEnded
from .phases import by_phase
from .plan import AHEAD, GAP, PHASES, Pair, Step, Which, steps
from .survey import Timed

USED = 0.2
"""The part of its own share's time that the victim uses: enough requests, and few that wait for each other."""
FASTEST = 300.0
"""Requests a second of a victim at most, as its client takes time too."""
CONNECTIONS, MOST = 8, 128
"""Connections that the victim has at first, and at most."""
LOOK = 0.25
"""Seconds between two looks at whether the server still runs."""


@dataclass(frozen=True, slots=True)
class Places:
    """The cores of load processes: the victim's client's, and those of the aggressor's; None for any.

    `apart` is whether no process of the server uses them, so that the victim's client may spin.
    """

    victim: tuple[int, ...] | None = None
    aggressor: tuple[int, ...] | None = None
    apart: bool = False

    @property
    def processes(self) -> int:
        """Load processes of an aggressor."""
        return max(1, min(4, len(self.aggressor or ()) // 2))


@dataclass(frozen=True, slots=True)
class Beside:
    """The same kind of aggressor as another tenant and, for the control, as the victim's own."""

    other: Attack
    own: Attack


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one kind of aggressor: latencies by phase and round, growth, and the verdict.

    `rates` are what the aggressor had answered a second, as another tenant and in the control; `busy` is the part of the time
    in which the other tenant's partition or process was, and `statuses` what it was answered.
    """

    attack: Beside
    rounds: Mapping[Which, tuple[Samples, ...]] = field(repr=False)
    held: Growth
    shared: Growth
    ruling: Ruling
    rates: Mapping[Which, float]
    busy: float
    statuses: Mapping[int, int]

    def figures(self, which: Which) -> Figures:
        """Of all rounds together."""
        return figures(merged(self.rounds[which]))


@dataclass(frozen=True, slots=True)
class Measured:
    """A pair: the victim's model and rate, and a result for each kind; `late` is by how much its client was (p99, seconds).

    `others` is the part of the cores' time that other programs used meanwhile. `failures` says when and how the first of the
    victim's requests failed.
    """

    pair: Pair
    model: str
    rate: float
    late: float
    others: float
    results: tuple[Result, ...]
    failures: tuple[str, ...] = ()


def rate_of(timed: Timed) -> float:
    """Requests a second that a victim can take without waiting for itself."""
    return min(FASTEST, USED / timed.seconds)


@dataclass(frozen=True, slots=True)
class Victim:
    """A tenant's request, again and again."""

    name: str
    model: str
    job: OpenLoop
    rate: float


def measure(
    pair: Pair,
    victim: Victim,
    attacks: Mapping[str, Beside],
    rounds: int,
    places: Places,
    others: Callable[[], Others],
    alive: Callable[[], str],
    report: Callable[[str], None],
) -> Measured:
    """Run all phases of this pair. Blocks.

    `others` begins to count other programs; `alive` says why the server ended, or nothing. Raises ServerEnded if it did, or
    if a load process could not begin.
    """
    phases = steps(list(attacks), rounds)
    jobs: list[Job] = [_timed(victim, phases, places), *_turns(victim.job.port, phases, attacks, places)]
    try:
        with begun(jobs) as (start, processes):
            counted = others()
            _wait(start, phases, pair, alive, report)
            seen = processes[0].result()
            tallies = [process.results() for process in processes[1:]]
    except LoadProcessFailed as failed:
        raise ServerEnded(alive() or str(failed).splitlines()[-1]) from failed
    if why := alive():
        raise ServerEnded(why)
    assert isinstance(seen, Seen)
    share = counted.share()
    late = percentile(sorted(seen.late), 0.99) / 1e6
    results = tuple(_result(kind, attacks[kind], phases, seen, tallies, share) for kind in attacks)
    return Measured(pair, victim.model, victim.rate, late, share, results, tuple(seen.failures))


def _timed(victim: Victim, phases: Sequence[Step], places: Places) -> OpenLoop:
    """The victim's client: requests in the phases only, so that nothing waits at the beginning of one."""
    due = [
        step.begin + at for number, step in enumerate(phases) for at in poisson(victim.rate, step.end - step.begin, seed=number)
    ]
    return client(victim.job.port, victim.job.ask, due, places)


def client(port: int, ask: Ask, due: list[float], places: Places) -> OpenLoop:
    """The client of a tenant that is measured, a victim or a lender: each request is sent when it is due."""
    return OpenLoop(
        port=port,
        ask=ask,
        arrivals=due,
        connections=CONNECTIONS,
        most=MOST,
        spin=places.apart,
        keep=1 << 30,
        cores=places.victim,
    )


def _turns(port: int, phases: Sequence[Step], attacks: Mapping[str, Beside], places: Places) -> list[InTurn]:
    """Load processes that are one aggressor after another, between the phases in which the victim is alone."""
    rows = [
        getattr(attacks[step.kind], "other" if step.which == "beside" else "own").jobs(
            port, step.begin - AHEAD, step.end, places.processes, places.aggressor
        )
        for step in phases
        if step.which != "alone"
    ]
    count = max(map(len, rows))
    return [InTurn(tuple(row[number % len(row)] for row in rows), places.aggressor) for number in range(count)]


def _wait(
    start: float,
    phases: Sequence[Step],
    pair: Pair,
    alive: Callable[[], str],
    report: Callable[[str], None],
) -> None:
    """Until the last phase has ended, or the server has. Raises ServerEnded."""
    said = -1
    for step in phases:
        while (left := start + step.end + GAP - perf_counter()) > 0:
            if why := alive():
                raise ServerEnded(why)
            if step.round != said:
                report(f"{pair}: round {step.round + 1} of {phases[-1].round + 1}")
                said = step.round
            sleep(min(left, LOOK))


def _result(
    kind: str, attack: Beside, phases: Sequence[Step], seen: Seen, tallies: Sequence[Sequence[Tally]], others: float
) -> Result:
    every = by_phase(phases, seen.samples)
    rounds = {which: tuple(_samples(kind, which, phases, every)) for which in PHASES}
    loud = [step for step in phases if step.which != "alone"]
    mine: dict[Which, list[Tally]] = {
        which: [turn[at] for turn in tallies for at, step in enumerate(loud) if (step.kind, step.which) == (kind, which)]
        for which in ("beside", "control")
    }
    lasted = {which: _lasted(loud, kind, which) for which in mine}
    rates: dict[Which, float] = {which: sum(each.answers for each in some) / lasted[which] for which, some in mine.items()}
    statuses: dict[int, int] = {}
    for tally in mine["beside"]:
        for status, count in tally.statuses.items():
            statuses[status] = statuses.get(status, 0) + count
    right = sum(count for status, count in statuses.items() if status in attack.other.expected)
    busy = min(1.0, right * attack.other.seconds / lasted["beside"])
    ruling, held, shared = rule(rounds["alone"], rounds["beside"], rounds["control"], busy, others)
    return Result(attack, rounds, held, shared, ruling, rates, busy, statuses)


def _lasted(phases: Sequence[Step], kind: str, which: Which) -> float:
    """For how many seconds this aggressor ran."""
    return sum(step.end - step.begin + AHEAD for step in phases if (step.kind, step.which) == (kind, which))


def _samples(kind: str, which: Which, phases: Sequence[Step], every: Sequence[Samples]) -> Iterator[Samples]:
    """The victim's requests of each round; alone those before every kind count, as they do not differ."""
    for turn in range(phases[-1].round + 1):
        yield merged(
            samples
            for step, samples in zip(phases, every, strict=True)
            if step.round == turn and step.which == which and (which == "alone" or step.kind == kind)
        )
