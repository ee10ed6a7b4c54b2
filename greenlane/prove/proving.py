"""The steps of `greenlane prove`: ask the server where work runs, find what its tenants take, and measure every pair."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from time import perf_counter
from typing import Any

from greenlane.load import machine, processes
from greenlane.load.jobs import OpenLoop
from greenlane.load.machine import Others
from greenlane.load.processes import LoadProcessFailed
from greenlane.load.wire import Broken, Caller
from partitions.strain import STRAINS, Strain

from . import confinement
from .access import Access, CannotProve, ServerEnded
from .attacks import BATCHES, MARGIN, Attack, attack, fenced, held, lacking, possible, strain, strain_body, strain_of, strains
from .command_line import spelled
from .confinement import Located, Watch
from .findings import Findings
from .inputs import binary
from .measure import Beside, Measured, Victim, measure, place, rate_of
from .plan import AHEAD, LEAST, ROUND, START, WINDOWS, Pair, near, needed, pairs, plan
from .survey import Surveyed, survey, timed

ASKING = 0.06
"""The part of all time in which the tenants' models are tried out."""
DRIVEN = 0.5
"""Seconds for which all tenants are driven at the same time, to see where their work runs."""
TRIES = 3
"""Times that this is done at most."""
AT_ONCE = 4
"""Requests of an attack that are timed, before it begins."""
UNFENCED = 1 / 3
"""The part of the time of all else that strains of memory, caches and PCIe get besides; all of it where they count."""
TRIAL, SOME = 0.3, 0.1
"""Seconds of a strain alone; and those it has to last, or it is tried again: the first on a GPU compiles its kernels."""


@dataclass(frozen=True, slots=True)
class Run:
    """What is measured, and how: a server, why it ended (empty while it runs), the seconds there are, and where to report to.

    `own` is whether it was started for this. `only` is the one tenant that is to be the victim; None for all. `source` names
    the configuration. `strains` are those of memory, caches and PCIe that may be tried; `memory` is whether they count.
    """

    access: Access
    alive: Callable[[], str]
    own: bool
    source: str
    seconds: float
    only: str | None
    command: str
    report: Callable[[str], None]
    memory: bool = False
    strains: Sequence[Strain] = STRAINS


@dataclass(slots=True)
class Progress:
    """What was found so far; it is the report if the server ends meanwhile."""

    located: Sequence[Located] = ()
    tenants: Sequence[Surveyed] = ()
    measured: list[Measured] = field(default_factory=list)
    unfenced: list[Measured] = field(default_factory=list)
    untried: dict[Pair, str] = field(default_factory=dict)
    ended: str = ""


def prove(run: Run) -> Findings:
    """Everything. Blocks for about `seconds`, or twice that where it is too noisy for verdicts, and for strains besides.

    Raises CannotProve.
    """
    began, found = perf_counter(), Progress()
    try:
        _prove(run, began + run.seconds, found)
    except ServerEnded as error:
        found.ended = run.alive() or str(error)
        missing = set(_wanted(run, found)) - {each.pair for each in found.measured}
        if run.memory:
            missing |= set(_near(run, found)) - {each.pair for each in found.unfenced} - found.untried.keys()
        found.untried |= {pair: found.ended for pair in _wanted(run, found) if pair in missing}
    return Findings(
        run.source,
        perf_counter() - began,
        machine.describe(run.command),
        found.located,
        found.tenants,
        found.measured,
        found.untried,
        found.ended,
        unfenced=found.unfenced,
        memory=run.memory,
        planned=run.seconds,
    )


def _prove(run: Run, end: float, found: Progress) -> None:
    _check_strains(run)
    run.report("probing where the work of each partition runs")
    found.located = confinement.probe(run.access)
    found.tenants = survey(run.access, run.seconds * ASKING, run.report)
    served = _processes(run.access, found.tenants)
    found.located = _driven(run, found, served)
    able = [pair for pair in _wanted(run, found) if _tenant(found, pair.victim).drivable]
    found.untried |= {pair: f"{pair.victim} has no model that can be asked" for pair in _wanted(run, found) if pair not in able}
    if not able:
        return
    possibles = {each.name: possible(each) for each in found.tenants}
    chosen = plan(able, possibles, end - perf_counter())
    for pair in chosen.left_out:
        more = run.seconds - (end - perf_counter()) + needed(able)
        found.untried[pair] = f"there was no time left for it; --seconds {more:.0f} has time for every pair"
    cores = {name: frozenset().union(*map(_affinity, pids)) for name, pids in served.items() if pids}
    every = sorted(os.sched_getaffinity(0))
    others = partial(Others, every, run.own)
    began, patience = perf_counter(), max(0.0, end - perf_counter()) + run.seconds
    for number, pair in enumerate(chosen.pairs, 1):
        until = began + patience * number / len(chosen.pairs)
        places = place(pair, found.located, cores, every)
        attacks = _attacks(run.access, _tenant(found, pair.victim), _tenant(found, pair.aggressor), chosen.kinds[pair])
        victim = _victim(run.access, _tenant(found, pair.victim))
        before = _fence(run.access, pair.victim)
        measured = measure(pair, victim, attacks, chosen.rounds, places, others, run.alive, run.report, until)
        after = held(pair.victim, before, _fence(run.access, pair.victim))
        found.measured.append(replace(measured, fenced=after))
    began, strained = perf_counter(), list(_unfenced(run, found, able))
    for number, (pair, kinds, rounds) in enumerate(strained, 1):
        until = began + 2 * run.seconds * number / len(strained) if run.memory else 0.0
        run.report(f"{pair}: straining memory")
        try:
            beside: dict[str, Beside] = {kind: _strains(run.access, pair, kind) for kind in kinds}
        except ServerEnded as error:
            if run.alive():
                raise
            why = f"strains of memory are refused: {error}"
            if run.memory:
                found.untried[pair] = why
            else:
                run.report(f"{pair}: {why}; they would not count")
            continue
        places = place(pair, found.located, cores, every)
        victim = _victim(run.access, _tenant(found, pair.victim))
        before = _fence(run.access, pair.victim)
        measured = measure(pair, victim, beside, rounds, places, others, run.alive, run.report, until)
        lines = held(pair.victim, before, _fence(run.access, pair.victim))
        if any(each.unit == "core" and each.tenant == pair.aggressor for each in found.located):
            lines += fenced(pair.aggressor, _fence(run.access, pair.aggressor))
            lines += (lacks,) if (lacks := lacking(run.strains)) else ()
        found.unfenced.append(replace(measured, fenced=lines))


def _check_strains(run: Run) -> None:
    """Say which of the chosen strains cores do not have. Raises CannotProve where strains were asked for that no pair has."""
    state = run.access.administer("GET", "/admin/partitions")
    unit = {each["name"]: each["unit"] for each in state["devices"]}
    device = {name: each["device"] for name, each in state["partitions"].items()}
    units = {unit[device[pair.aggressor]] for pair in near(device, run.only)}
    if not units and (asked := "--memory" if run.memory else "--strains" if run.strains != STRAINS else ""):
        raise CannotProve(f"{asked}: no two tenants share a device, so none feels another's strains; leave it out")
    if "core" in units and (lacks := lacking(run.strains)):
        if units == {"core"} and not strains("core", run.strains):
            raise CannotProve(f"--strains: {lacks}; choose from {', '.join(map(spelled, strains('core')))}, or leave it out")
        run.report(lacks)


def _fence(access: Access, tenant: str) -> Mapping[str, Any] | None:
    """What holds this tenant to its shares of bandwidth, as the server says it."""
    share: Mapping[str, Any] = access.administer("GET", "/admin/partitions")["partitions"].get(tenant, {})
    return share.get("fence")


def _unfenced(run: Run, found: Progress, able: Sequence[Pair]) -> Iterator[tuple[Pair, tuple[Strain, ...], int]]:
    """The pairs of tenants of one device that strains are tried with, and how: without `memory` the first, if there is time."""
    unit = {each.tenant: each.unit for each in found.located}
    able = [pair for pair in _near(run, found) if pair in able]
    possibles = {pair.aggressor: strains(unit.get(pair.aggressor, "core"), run.strains) for pair in able}
    if run.memory:
        found.untried |= {pair: lacking(run.strains) for pair in able if not possibles[pair.aggressor]}
    able = [pair for pair in able if possibles[pair.aggressor]]
    if not run.memory:
        if able and run.seconds * UNFENCED < (least := START + LEAST * ROUND):
            has = f"--seconds {ceil(least / UNFENCED)} has it"
            run.report(f"no time is left for strains of memory, which would not count; {has}")
            able = []
        able = able[:1]
    chosen = plan(able, possibles, run.seconds if run.memory else run.seconds * UNFENCED, LEAST)
    for pair in chosen.left_out:
        more = f"--seconds {needed(able):.0f} has time for every pair"
        found.untried.setdefault(pair, f"there was no time left for strains of memory; {more}")
    for pair in chosen.pairs:
        yield pair, tuple(kind for kind in possibles[pair.aggressor] if kind in chosen.kinds[pair]), chosen.rounds


def _wanted(run: Run, found: Progress) -> list[Pair]:
    return pairs({each.name: each.device for each in found.tenants}, run.only)


def _near(run: Run, found: Progress) -> list[Pair]:
    """Those of tenants of one device."""
    return near({each.name: each.device for each in found.tenants}, run.only)


def _tenant(found: Progress, name: str) -> Surveyed:
    return next(each for each in found.tenants if each.name == name)


def _processes(access: Access, tenants: Sequence[Surveyed]) -> dict[str, frozenset[int]]:
    """The processes that serve each tenant; empty for one without models, and for processes of another user."""
    found: dict[str, frozenset[int]] = {}
    for tenant in tenants:
        with closing(Caller(access.port)) as caller:
            if tenant.drivable and _answered(caller, tenant, access) and caller.own_port:
                found[tenant.name] = confinement.processes_of(access.port, caller.own_port)
    return found


def _answered(caller: Caller, tenant: Surveyed, access: Access) -> bool:
    model = tenant.quickest
    try:
        return caller.ask(binary(model.model, model.small.form, access.headers(tenant.name))).status == 200
    except Broken as broken:
        raise ServerEnded(f"{tenant.name} is not answered any more: {broken}") from broken


def _driven(asked: Run, found: Progress, served: Mapping[str, frozenset[int]]) -> list[Located]:
    """Where the tenants' own work runs while all of them are busy; again where not all of it was seen, as on a busy machine."""
    asked.report("watching where the models' own threads run")
    for _ in range(TRIES):
        located = _driven_once(asked.access, found, served)
        if all(each.own_word != "not exercised" for each in located if each.unit == "core" and served.get(each.tenant)):
            break
    return located


def _driven_once(access: Access, found: Progress, served: Mapping[str, frozenset[int]]) -> list[Located]:
    jobs = []
    for each in found.tenants:
        if each.drivable:
            jobs += attack(BATCHES, each, access).jobs(access.port, 0.0, DRIVEN, 1, _cores(found.located, each))
    watch = Watch(served)
    watch.start()
    try:
        processes.run(jobs)
    except LoadProcessFailed as failed:
        raise ServerEnded(str(failed).splitlines()[-1]) from failed
    finally:
        threads = watch.stop()
    owner = {unit: f"of {each.tenant}" for each in found.located if each.unit == "core" for unit in each.units}
    mixed = {name for name, pids in served.items() for other, others in served.items() if name != other and pids & others}
    return [
        confinement.unseen(each, "its process serves other tenants as well, whose threads look alike")
        if each.tenant in mixed
        else confinement.judged(each, threads.get(each.tenant, {}), owner)
        for each in found.located
    ]


def _cores(located: Sequence[Located], tenant: Surveyed) -> tuple[int, ...] | None:
    cores = next((each.units for each in located if each.tenant == tenant.name and each.unit == "core"), ())
    return tuple(sorted(os.sched_getaffinity(0).intersection(cores))) or None


def _attacks(access: Access, victim: Surveyed, aggressor: Surveyed, kinds: Sequence[str]) -> dict[str, Beside]:
    """Each kind of aggressor, as another tenant and as the victim's own, with the time that one request takes alone."""
    found = {}
    with closing(Caller(access.port)) as caller:
        for kind in kinds:
            other = attack(kind, aggressor, access)
            found[kind] = Beside(_with_time(caller, other), attack(kind, victim, access, like=other))
    return found


def _strains(access: Access, pair: Pair, kind: Strain) -> Beside:
    """A strain by the aggressor's share, with its rate alone, and by the victim's."""

    def alone() -> dict[str, float]:
        return access.administer("POST", strain_of(pair.aggressor), strain_body(kind, TRIAL))

    done = alone()
    if done["seconds"] < SOME:
        done = alone()
    other = strain(kind, pair.aggressor, access)
    lasts = WINDOWS["beside"] + AHEAD - MARGIN
    return Beside(replace(other, seconds=lasts, rate=done["gigabytes_per_second"]), strain(kind, pair.victim, access))


def _with_time(caller: Caller, attack: Attack) -> Attack:
    try:
        return replace(attack, seconds=timed(caller, attack.asks[:AT_ONCE]))
    except Broken as broken:
        raise ServerEnded(f"the aggressor's requests ({attack.kind}) are not answered: {broken}") from broken


def _victim(access: Access, tenant: Surveyed) -> Victim:
    model = tenant.quickest
    ask = binary(model.model, model.small.form, access.headers(tenant.name))
    job = OpenLoop(port=access.port, ask=ask, arrivals=[], connections=1, most=1)
    return Victim(tenant.name, model.model.name, job, rate_of(model.small))


def _affinity(pid: int) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(pid))
    except OSError:
        return frozenset()
