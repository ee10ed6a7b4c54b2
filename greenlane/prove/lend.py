"""Measures a lender beside its borrower, on a server that lends and on one that does not, in turns."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, sleep

from greenlane.load import machine
from greenlane.load.figures import Samples, merged
from greenlane.load.jobs import ClosedLoop, InTurn, OpenLoop, Seen, Tally
from greenlane.load.machine import Others
from greenlane.load.processes import Job, LoadProcessFailed, begun, poisson, run
from greenlane.load.rules import Ruling
from server.command_line import configuration_file
from server.config import file
from server.config.tables import ConfigError

from . import confinement
from .access import Access, CannotProve, ServerEnded
from .attacks import BATCHES, Attack, attack
from .command_line import Options
from .confinement import Located
from .findings import Findings
from .inputs import binary
from .lending import (
    FEWEST,
    IDLE,
    IDLES,
    LOADS,
    REQUESTS,
    STATES,
    WARM_UP,
    Borrowed,
    Lent,
    Level,
    State,
    Turn,
    decide,
    decide_first,
    needed,
    rounds_in,
    turns,
)  # fmt: skip
from .measure import LOOK, Places, client, place
from .plan import AHEAD, GAP, Pair, by_phase
from .proving import ASKING
from .server import Started, started
from .survey import Surveyed, Timed, survey

LONG, LONGEST = 0.002, 0.02
"""Seconds of a lender's request at most, as the bound is for works of some hundred microseconds; and of a borrower's."""
FASTEST, FASTEST_BESIDE = 600.0, 200.0
"""Requests a second of a lender at most, as its client takes time too: where that has cores of its own, and where it uses the
lender's."""
BORROWING = 2
"""Connections of the borrower: one request waits while the other runs, and they are hardly ever joined to a longer one."""


def lending(options: Options, source: str, command: str, say: Callable[[str], None]) -> Findings:
    """Everything. Blocks. Raises CannotProve, also where no tenant lends or none may borrow."""
    wanted = _pairs(options)
    with ExitStack() as stack:
        say("starting two servers, of which one lends nothing")
        servers: dict[State, Started] = {}
        for state in STATES:
            servers[state] = stack.enter_context(started(options.config, say, lends=state == "on"))
        began, on = perf_counter(), servers["on"]
        located = confinement.probe(on.access)
        tenants = survey(on.access, options.seconds * ASKING, say, _longest(on))
        by_name, end = {each.name: each for each in tenants}, began + options.seconds
        found = _measured(servers, wanted, by_name, located, options, end, say)
        facts = machine.describe(command)
        return Findings(source, perf_counter() - began, facts, located, tenants, [], found.untried, found.ended, found.lent)


def _pairs(options: Options) -> list[Pair]:
    """Every lender with every borrower of its device, from the file, before any server is started. Raises CannotProve."""
    if not (path := configuration_file(options.config)):
        raise CannotProve("expected --config FILE: the demo lends nothing")
    try:
        config = file.load(Path(path))
    except ConfigError as error:
        raise CannotProve(f"the configuration cannot be served:\n{error}") from error
    found = [
        Pair(lender.name, borrower.name)
        for lender in config.tenants.values()
        for borrower in config.tenants.values()
        if lender is not borrower and lender.lend and borrower.burst and lender.device == borrower.device
    ]
    found = [pair for pair in found if options.only in (None, pair.victim)]
    if not found:
        raise CannotProve("no tenant has `lend` beside another one with a `burst` on its device: nothing can be lent")
    return found


@dataclass(slots=True)
class Found:
    """What came of all pairs."""

    lent: list[Lent] = field(default_factory=list)
    untried: dict[Pair, str] = field(default_factory=dict)
    ended: str = ""


def _longest(on: Started) -> dict[str, float]:
    """The longest request of each tenant: a borrower's has to be shorter than what lenders allow, also when it is not alone."""
    borrowed = min(LONGEST, min(on.lend.values(), default=LONG) / 2)
    return {name: borrowed if name in on.burst else LONG for name in on.tenants}


def _measured(
    servers: Mapping[State, Started],
    wanted: Sequence[Pair],
    tenants: Mapping[str, Surveyed],
    located: Sequence[Located],
    options: Options,
    end: float,
    say: Callable[[str], None],
) -> Found:
    why = "one of the two has no model that can be asked"
    found = Found(untried={pair: why for pair in wanted if not _able(pair, tenants)})
    able = [pair for pair in wanted if pair not in found.untried]
    left = end - perf_counter()
    fits = next((count for count in range(len(able), 1, -1) if rounds_in(left, count) >= FEWEST), min(1, len(able)))
    seconds = options.seconds - left + needed(len(able))
    found.untried |= dict.fromkeys(
        able[fits:], f"there was no time left for it; --seconds {seconds:.0f} has time for every pair"
    )
    rounds = max(1, rounds_in(left, fits))
    for pair in able[:fits]:
        places = place(pair, located, {}, sorted(os.sched_getaffinity(0)))
        try:
            found.lent.append(_pair(pair, tenants, servers, rounds, places, say))
        except ServerEnded as error:
            found.ended = str(error)
            found.untried |= dict.fromkeys(able[len(found.lent) : fits], found.ended)
            break
    return found


def _able(pair: Pair, tenants: Mapping[str, Surveyed]) -> bool:
    return bool(tenants[pair.victim].drivable and tenants[pair.aggressor].drivable)


def _pair(
    pair: Pair,
    tenants: Mapping[str, Surveyed],
    servers: Mapping[State, Started],
    rounds: int,
    places: Places,
    say: Callable[[str], None],
) -> Lent:
    """Run all phases of this pair. Blocks. Raises ServerEnded."""
    phases, request = turns(rounds), tenants[pair.victim].quickest
    rates = {load: rate_of(request.large, load, FASTEST if places.apart else FASTEST_BESIDE) for load in LOADS}
    borrower = _fitting(tenants[pair.aggressor], servers["on"].lend[pair.victim])
    jobs: list[Job] = []
    for state in STATES:
        mine = [turn for turn in phases if turn.state == state]
        access = servers[state].access
        jobs.append(_lender(access, tenants[pair.victim], mine, rates, places))
        jobs.append(_borrower(access, borrower, mine, places))
    try:
        say(f"{pair}: the borrower alone, which learns what its inferences take")
        run(_kind(servers["on"].access, borrower).jobs(servers["on"].access.port, 0, WARM_UP, 1, places.aggressor))
        before = _borrowed_by(pair.aggressor, servers["on"].access)
        with begun(jobs) as (start, processes):
            others = Others(sorted(os.sched_getaffinity(0)), whole=True)
            _wait(start, phases, pair, servers, say)
            seen = {state: processes[2 * at].result() for at, state in enumerate(STATES)}
            tallies = {state: processes[2 * at + 1].results() for at, state in enumerate(STATES)}
    except LoadProcessFailed as failed:
        raise ServerEnded(_gone(servers) or str(failed).splitlines()[-1]) from failed
    if why := _gone(servers):
        raise ServerEnded(why)
    borrowed = _borrowed_by(pair.aggressor, servers["on"].access).since(before)
    limit = servers["on"].lend[pair.victim]
    return judged(pair, request.model.name, limit, phases, rates, seen, tallies, borrowed, others.share())  # type: ignore[arg-type]


def _borrowed_by(tenant: str, access: Access) -> Borrowed:
    share = access.administer("GET", "/admin/partitions")["partitions"].get(tenant, {})
    return Borrowed.of(share.get("wide") or {})


def rate_of(timed: Timed, load: float, most: float) -> float:
    """Requests a second that use this part of the time, or `most` if that is more."""
    return min(most, load / timed.seconds)


def _lender(access: Access, tenant: Surveyed, mine: Sequence[Turn], rates: Mapping[float, float], places: Places) -> OpenLoop:
    model = tenant.quickest
    due: list[float] = []
    for number, turn in enumerate(mine):
        if turn.load:
            due += [turn.begin + at for at in poisson(rates[turn.load], turn.end - turn.begin, seed=number)]
        else:
            jitter = random.Random(number)
            due += [turn.begin + IDLE * (at + 1) + jitter.uniform(0, IDLE / 4) for at in range(REQUESTS)]
    ask = binary(model.model, model.large.form, access.headers(tenant.name))
    return client(access.port, ask, due, places)


def _borrower(access: Access, tenant: Surveyed, mine: Sequence[Turn], places: Places) -> InTurn:
    kind = _kind(access, tenant)
    jobs: list[ClosedLoop] = []
    for turn in mine:
        jobs += kind.jobs(access.port, turn.begin - AHEAD, turn.end, 1, places.aggressor)
    return InTurn(tuple(jobs), places.aggressor)


def _fitting(borrower: Surveyed, limit: float) -> Surveyed:
    """The borrower with those of its models that take at most this long, if any do: its longest are not launched wide."""
    short = [each for each in borrower.drivable if each.large.seconds <= limit]
    return replace(borrower, drivable=short or borrower.drivable)


def _kind(access: Access, tenant: Surveyed) -> Attack:
    """What the borrower asks."""
    return replace(attack(BATCHES, tenant, access), connections=BORROWING)


def _wait(
    start: float, phases: Sequence[Turn], pair: Pair, servers: Mapping[State, Started], say: Callable[[str], None]
) -> None:
    said = ""
    for turn in phases:
        what = f"load {turn.load:.0%}" if turn.load else "single requests after idling"
        text = f"{pair}: round {turn.round + 1}" if turn.load else f"{pair}: {what}"
        while (left := start + turn.end + GAP - perf_counter()) > 0:
            if why := _gone(servers):
                raise ServerEnded(why)
            if text != said:
                say(text)
                said = text
            sleep(min(left, LOOK))


def _gone(servers: Mapping[State, Started]) -> str:
    return next((why for server in servers.values() if (why := server.alive())), "")


def judged(
    pair: Pair,
    model: str,
    lend: float,
    phases: Sequence[Turn],
    rates: Mapping[float, float],
    seen: Mapping[State, Seen],
    tallies: Mapping[State, Sequence[Tally]],
    borrowed: Borrowed,
    others: float,
) -> Lent:
    """What came of one pair; `lend` is the lender's, in seconds."""
    mine = {state: [turn for turn in phases if turn.state == state] for state in STATES}
    levels = []
    for load in LOADS:
        rounds = {state: tuple(_samples(load, mine[state], seen[state])) for state in STATES}
        ruling, growth = decide(rounds["off"], rounds["on"], borrowed.lacks(), others)
        answers: dict[State, float] = {state: _answers(load, mine[state], tallies[state]) for state in STATES}
        levels.append(Level(load, rates[load], rounds, answers, growth, ruling))
    single = [merged(_samples(0.0, mine[state], seen[state])) for state in STATES]
    first, late = decide_first(single[0], single[1], lend * 1e6, borrowed.lacks())
    if len(single[0]) + len(single[1]) < 2 * IDLES:
        first = Ruling("too noisy", "too few requests after idling")
    return Lent(pair, model, lend, others, borrowed, tuple(levels), late, first)


def _answers(load: float, mine: Sequence[Turn], tallies: Sequence[Tally]) -> float:
    """Answers a second of the borrower at this load."""
    chosen = [(turn, tally) for turn, tally in zip(mine, tallies, strict=True) if turn.load == load]
    lasted = sum(turn.end - turn.begin + AHEAD for turn, _ in chosen)
    return sum(tally.statuses.get(200, 0) for _, tally in chosen) / lasted if lasted else 0.0


def _samples(load: float, mine: Sequence[Turn], seen: Seen) -> list[Samples]:
    """The lender's requests of each phase at this load, in the order of rounds."""
    found = by_phase(mine, seen.samples)
    return [samples for turn, samples in zip(mine, found, strict=True) if turn.load == load]
