"""One pair measured: the victim in an open loop, and the aggressor of another tenant, or in its own, in turns.

Where that gives no verdict, what is undecided is measured again, as long as there is time. If all rounds together decide
nothing, the quiet ones do: rounds are chosen by what other programs used meanwhile, never by what was measured in them.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from time import perf_counter, sleep

from greenlane.load.figures import Figures, Samples, figures, merged, percentile
from greenlane.load.jobs import Ask, InTurn, OpenLoop, Seen, Tally
from greenlane.load.machine import Others
from greenlane.load.processes import Job, LoadProcessFailed, begun, poisson
from greenlane.load.rules import BUSY, OTHERS, Growth, Ruling, failures, rule

from .access import ServerEnded
from .attacks import Attack
from .confinement import Located
from .plan import AHEAD, GAP, LEAST, PHASES, ROUND, START, Pair, Step, Which, by_phase, steps
from .survey import Timed

USED = 0.2
"""The part of its own share's time that the victim uses: enough requests, and few that wait for each other."""
FASTEST = 300.0
"""Requests a second of a victim at most, as its client takes time too."""
CONNECTIONS, MOST = 8, 128
"""Connections that the victim has at first, and at most."""
LOOK = 0.25
"""Seconds between two looks at whether the server still runs."""
LOUD: tuple[Which, ...] = ("beside", "control")
"""The phases in which there is an aggressor."""


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
    """What came of one kind of aggressor: latencies by phase and round, of those rounds that the verdict rests on, and growth.

    `rates` are what the aggressor had answered a second, as another tenant and in the control; `busy` is the part of the time
    in which the other tenant's partition or process was, and `statuses` what it was answered. `moved` are the gigabytes a
    second of a strain, NaN where it was not answered; models have none.
    """

    attack: Beside
    rounds: Mapping[Which, tuple[Samples, ...]] = field(repr=False)
    held: Growth
    shared: Growth
    ruling: Ruling
    rates: Mapping[Which, float]
    busy: float
    statuses: Mapping[int, int]
    moved: Mapping[Which, float] = field(default_factory=dict)

    def figures(self, which: Which) -> Figures:
        """Of these rounds together."""
        return figures(merged(self.rounds[which]))

    @property
    def undecided(self) -> bool:
        """Whether more time or a quieter machine may give a verdict."""
        return self.ruling.word == "too noisy"


@dataclass(frozen=True, slots=True)
class Measured:
    """A pair: the victim's model and rate, and a result for each kind; `late` is by how much its client was (p99, seconds).

    `others` is the part of the cores' time that other programs used meanwhile. `failures` says when and how the first of the
    victim's requests failed. `fenced` are lines that say what holds the aggressor's strains, and what held the victim.
    """

    pair: Pair
    model: str
    rate: float
    late: float
    others: float
    results: tuple[Result, ...]
    failures: tuple[str, ...] = ()
    fenced: tuple[str, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Pass:
    """All phases once: what the victim's client saw, what each of the aggressor's processes did in each loud phase.

    `others` is the part of the cores' time that other programs used in each round of each kind.
    """

    phases: Sequence[Step]
    seen: Seen
    tallies: Sequence[Sequence[Tally]]
    others: Mapping[tuple[int, str], float]


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of one kind: its requests, and what the aggressor was answered, in how many seconds; of a strain all of it."""

    others: float
    samples: Mapping[Which, Samples]
    statuses: Mapping[Which, Counter[int]]
    answers: Mapping[Which, int]
    lasted: Mapping[Which, float]
    bodies: Mapping[Which, Sequence[bytes]]


def measure(
    pair: Pair,
    victim: Victim,
    attacks: Mapping[str, Beside],
    rounds: int,
    places: Places,
    others: Callable[[], Others],
    alive: Callable[[], str],
    report: Callable[[str], None],
    until: float = 0.0,
) -> Measured:
    """Run all phases of this pair, and those of undecided kinds again as long as they end before `until`. Blocks.

    `others` begins to count other programs; `alive` says why the server ended, or nothing; `until` is a time of
    perf_counter. Raises ServerEnded if it did, or if a load process could not begin.
    """

    def once(kinds: Sequence[str], rounds: int) -> Pass:
        phases = steps(kinds, rounds)
        jobs: list[Job] = [_timed(victim, phases, places), *_turns(victim.job.port, phases, attacks, places)]
        try:
            with begun(jobs) as (start, processes):
                shares = _wait(start, phases, pair, others, alive, report)
                seen = processes[0].result()
                tallies = [process.results() for process in processes[1:]]
        except LoadProcessFailed as failed:
            raise ServerEnded(alive() or str(failed).splitlines()[-1]) from failed
        if why := alive():
            raise ServerEnded(why)
        assert isinstance(seen, Seen)
        return Pass(phases, seen, tallies, shares)

    passes: list[Pass] = []
    results: dict[str, Result] = {}
    kinds, left = list(attacks), rounds
    while kinds and left > 0:
        passes.append(once(kinds, left))
        results |= {kind: judged(kind, attacks[kind], passes) for kind in kinds}
        kinds = [kind for kind in kinds if results[kind].undecided]
        left = min(rounds, int((until - perf_counter() - START) / (ROUND * max(1, len(kinds)))))
        if kinds and left > 0:
            report(f"{pair}: too noisy for a verdict on {', '.join(kinds)}: again")
    late = percentile(sorted(late for one in passes for late in one.seen.late), 0.99) / 1e6
    share = fmean(each for one in passes for each in one.others.values())
    failures = tuple(failure for one in passes for failure in one.seen.failures)
    return Measured(pair, victim.model, victim.rate, late, share, tuple(results.values()), failures)


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
    others: Callable[[], Others],
    alive: Callable[[], str],
    report: Callable[[str], None],
) -> dict[tuple[int, str], float]:
    """Until the last phase has ended, or the server has: raises ServerEnded. What other programs used in each round and kind.

    They are counted in the pause after a control, when no request is timed.
    """
    said, shares, counted = -1, {}, others()
    for step in phases:
        while (left := start + step.end + GAP - perf_counter()) > 0:
            if why := alive():
                raise ServerEnded(why)
            if step.round != said:
                report(f"{pair}: round {step.round + 1} of {phases[-1].round + 1}")
                said = step.round
            sleep(min(left, LOOK))
        if step.which == PHASES[-1]:
            shares[step.round, step.kind] = counted.share()
            counted = others()
    return shares


def judged(kind: str, attack: Beside, passes: Sequence[Pass]) -> Result:
    """The verdict of all rounds; where they decide nothing, that of the quiet ones if there are some and they do."""
    turns = [turn for one in passes for turn in _of(kind, one)]
    whole = _result(attack, turns)
    quiet = [turn for turn in turns if not turn.others > OTHERS]
    if whole.ruling.word in ("isolated", "leaks") or not LEAST <= len(quiet) < len(turns):
        return whole
    found = _result(attack, quiet)
    if found.undecided:
        return whole
    where = f"in the {len(quiet)} of {len(turns)} rounds in which other programs used at most {OTHERS:.0%} of the cores"
    return replace(found, ruling=replace(found.ruling, why=f"{found.ruling.why} ({where})"))


def _result(attack: Beside, turns: Sequence[Turn]) -> Result:
    rounds = {which: tuple(turn.samples[which] for turn in turns) for which in PHASES}
    lasted = {which: sum(turn.lasted[which] for turn in turns) for which in LOUD}
    rates: dict[Which, float] = {which: sum(turn.answers[which] for turn in turns) / lasted[which] for which in LOUD}
    statuses = sum((turn.statuses["beside"] for turn in turns), Counter[int]())
    right = sum(count for status, count in statuses.items() if status in attack.other.expected)
    busy = min(1.0, right * attack.other.seconds / lasted["beside"])
    others = fmean(turn.others for turn in turns)
    ruling, held, shared = rule(rounds["alone"], rounds["beside"], rounds["control"], busy, others)
    if ruling.word == "not exercised" and busy < BUSY and statuses[429] > right and not failures(rounds["alone"]):
        refused = f"{statuses[429]} of its {sum(statuses.values())} requests were refused (429)"
        cause = "such as for a limit of its tenant, which is lifted without --url"
        why = f"the aggressor was busy for {busy:.0%} of the time, as {refused}, {cause}"
        ruling = replace(ruling, why=why)
    moved = {which: _moved([body for turn in turns for body in turn.bodies[which]]) for which in LOUD}
    return Result(attack, rounds, held, shared, ruling, rates, busy, statuses, moved if attack.other.lasting else {})


def _moved(answers: Sequence[bytes]) -> float:
    """The mean of the gigabytes a second that answers to strains say; NaN if there is none. Others may be of a proxy's own."""
    rates = []
    for body in answers:
        with suppress(ValueError, TypeError, KeyError):
            rates.append(float(json.loads(body)["gigabytes_per_second"]))
    return fmean(rates) if rates else math.nan


def _of(kind: str, one: Pass) -> Iterator[Turn]:
    """The rounds of this kind in a pass, if it is there. Alone those before every kind count, as they do not differ.

    Where the round was quiet, only those count that were quiet as well.
    """
    phases, every = one.phases, by_phase(one.phases, one.seen.samples)
    loud = [step for step in phases if step.which != "alone"]
    for turn in sorted({step.round for step in phases if step.kind == kind}):
        others = one.others[turn, kind]

        def counts(step: Step, turn: int = turn, others: float = others) -> bool:
            if step.round != turn or step.which != "alone":
                return (step.round, step.kind) == (turn, kind)
            return others > OTHERS or not one.others[turn, step.kind] > OTHERS

        mine = {which: [step for step in phases if step.which == which and counts(step)] for which in PHASES}
        did = {which: [row[loud.index(step)] for row in one.tallies for step in mine[which]] for which in LOUD}
        yield Turn(
            others,
            {which: merged(every[phases.index(step)] for step in mine[which]) for which in PHASES},
            {which: sum((Counter(tally.statuses) for tally in did[which]), Counter[int]()) for which in LOUD},
            {which: sum(tally.answers for tally in did[which]) for which in LOUD},
            {which: sum(step.end - step.begin + AHEAD for step in mine[which]) for which in LOUD},
            {which: [body for tally in did[which] for body in tally.bodies] for which in LOUD},
        )


ENOUGH = 2
"""Cores without a tenant from which clients run there: one for the victim's, and the others."""


def place(pair: Pair, located: Sequence[Located], served: Mapping[str, frozenset[int]], every: Sequence[int]) -> Places:
    """The cores for this pair's clients. The tenants' processes may use the cores `served`, and this process the cores `every`.

    Where there are cores that no tenant has, on those. On a machine whose cores are all given away, each client runs on its own
    tenant's: a neighbour brings its noise along to its own share, and none is on another's. In the control the aggressor's
    client stays where it was, so that what the control shows is the server's partition and not the client.
    """
    of = {each.tenant: each.units for each in located if each.unit == "core"}
    taken = {core for cores in (*of.values(), *served.values()) for core in cores}
    left = tuple(core for core in every if core not in taken)
    if len(left) >= ENOUGH:
        return Places(left[:1], left[1:], apart=True)
    mine, others = (tuple(core for core in of.get(name, ()) if core in every) for name in (pair.victim, pair.aggressor))
    return Places(mine[:1] or None, others or None)
