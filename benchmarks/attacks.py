"""`python -m benchmarks.attacks`: a tenant's latency while other clients attack the server, on two cores.

For each attack of benchmarks/hostile.py a server of its own: rounds of a quiet phase and a phase of the attack, in which
another tenant asks 100 times a second; then SIGTERM in the middle of it. Rounds that other programs disturb are tried again.
And a process of the server is stopped, as by a debugger, and has to be replaced. The limits are those of GOALS. The exit
status is 0 if none was missed.
"""

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from greenlane.load import machine
from greenlane.load.jobs import Tally
from greenlane.options import count, positive

from .attacked import DISPATCHER, LIMIT, SHARED, Attacked, build, opened
from .goals import MISSED, Felt, Goal, Row
from .hostile import ATTACKER, ATTACKS, DOOR, MOVING, Crowd
from .options import named
from .outcomes import Outcome, as_json, failed, judge_all, progress, table

STOPPED = {f"stopped-{name.strip('()')}": name for name in (ATTACKER, SHARED, DISPATCHER)}
"""Names of the processes that are stopped by SIGSTOP."""
PHASES = (*ATTACKS, *STOPPED)
ROUNDS = 3
QUIET = 0.05
"""A round in which other programs, or the host, used more of the cores is tried again, at most once for each round."""


def goals(phase: str) -> tuple[Goal, ...]:
    """The goals of this phase."""
    found = (
        Goal(phase, "ratio", "p99 over alone, median of the rounds", 1.5, ""),
        Goal(phase, "over", "slowest answer over the quiet phase's, median of the rounds", 20),
        Goal(phase, "end", "from SIGTERM to the end, drain_grace 0", LIMIT, "s"),
    )
    replaced = Goal(phase, "replaced", "until another process answers, most", 5, "s")
    return (*found, replaced) if phase in STOPPED else found


GOALS = tuple(goal for phase in PHASES for goal in goals(phase))
"""The three sentences of issue 12, "How fast"."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 0 where every goal that was tried was met, 1 where one was missed."""
    options = _parser().parse_args(arguments)
    outcomes: dict[str, Outcome] = {}
    facts, began = machine.describe(machine.command("benchmarks.attacks")) | machine.load(), perf_counter()
    with tempfile.TemporaryDirectory(prefix="greenlane-attacks-") as folder:
        repository = Path(folder, "models")
        build(repository)
        for name in (name for name in PHASES if name in options.only):
            progress(name)
            outcomes[name] = outcome = tried(name, Path(folder), repository, options.seconds, options.rounds)
            progress(f"{name}: {perf_counter() - began:.0f} s so far{''.join(f'; {flaw}' for flaw in outcome.flaws)}")
            if options.output:  # After every phase, as whatever ends this process leaves those that were done.
                options.output.write_text(
                    json.dumps(as_json(facts, outcomes, judged(outcomes)), indent=2) + "\n", encoding="utf-8"
                )
    rows = judged(outcomes)
    print(table(facts, outcomes, rows))
    return int(any(row.verdict == MISSED for row in rows))


def judged(outcomes: dict[str, Outcome]) -> list[Row]:
    """A row for every goal of the phases that were asked for."""
    return judge_all([goal for goal in GOALS if goal.phase in outcomes], PHASES, outcomes, {})


def tried(name: str, folder: Path, repository: Path, seconds: float, rounds: int) -> Outcome:
    """Run this phase; anything that goes wrong is one of its flaws. Blocks."""
    try:
        if name in STOPPED:
            return hung(STOPPED[name], folder, repository, seconds, rounds)
        return attack(name, folder, repository, seconds, rounds)
    except Exception:
        return failed()


def attack(name: str, folder: Path, repository: Path, seconds: float, rounds: int) -> Outcome:
    """This attack, beside another tenant, and then at the server's end. Blocks. Raises NotServed, RuntimeError."""
    crowds, outcome = ATTACKS[name](), Outcome()
    per_round: list[list[Tally]] = []
    with opened(folder, repository, seconds, name in MOVING) as attacked:
        left, used = rounds, []
        while len(per_round) < rounds:
            found, tallies, others = attacked.beside(name, crowds, name in DOOR)
            used.append(round(others, 3))
            if others > QUIET and left:
                left -= 1
                continue
            outcome.felt += found
            per_round.append(tallies)
        _note_end(outcome, attacked, crowds)
    note_felt(outcome)
    outcome.flaws += [flaw for tallies in per_round for flaw in unreached(crowds, tallies)]
    statuses = Counter[int]()
    for tally in (tally for tallies in per_round for tally in tallies):
        statuses.update(tally.statuses)
    outcome.figures = {
        "answers by status, 0 for closed connections": dict(sorted(statuses.items())),
        "connections": sum(tally.opened for tallies in per_round for tally in tallies),
        f"part of the cores that other programs used in each round; over {QUIET:g}: tried again, {rounds} times at most": used,
    }
    return outcome


def hung(process: str, folder: Path, repository: Path, seconds: float, rounds: int) -> Outcome:
    """This process is stopped, and again; and once more, just before SIGTERM. Blocks. Raises NotServed, RuntimeError."""
    outcome, replaced = Outcome(), []
    with opened(folder, repository, seconds) as attacked:
        for _ in range(rounds):
            found, took = attacked.stopped(process)
            outcome.felt += found
            replaced.append(took)
        _note_end(outcome, attacked, (), process)
    note_felt(outcome)
    outcome.value("replaced", process, max(replaced))
    outcome.figures = {"seconds until it was replaced": replaced}
    return outcome


def unreached(crowds: Sequence[Crowd], tallies: Sequence[Tally]) -> list[str]:
    """Flaws: parts of an attack that did not happen, so that low latency beside it proves nothing."""
    return [
        f"the attack did not do what it is about: {tally.opened} connections, answers by status {tally.statuses}"
        for crowd, tally in zip(crowds, tallies, strict=True)
        if not crowd.reached(tuple(tally.statuses), tally.opened)
    ]


def note_felt(outcome: Outcome) -> None:
    """Add to the outcome what each way of asking has felt: the medians of the rounds, if all of them have answers."""
    for way in dict.fromkeys(each.tenant for each in outcome.felt):
        every: list[Felt] = [each for each in outcome.felt if each.tenant == way]
        if all(each.count and each.quiet_count for each in every):
            outcome.value("ratio", way, median(each.ratio for each in every))
            outcome.value("over", way, median(each.over(each.quiet_worst) for each in every))


def _note_end(outcome: Outcome, attacked: Attacked, crowds: Sequence[Crowd], stopped: str = "") -> None:
    took, flaws = attacked.ended(crowds, stopped)
    outcome.flaws += flaws
    outcome.value("end", stopped or "server", math.nan if flaws and took > LIMIT else took)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description="What a tenant feels of attacks.")
    parser.add_argument("--seconds", type=positive, default=6.0, help="length of a phase; default: 6")
    parser.add_argument("--rounds", type=count, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--only", type=named(PHASES), default=PHASES, metavar="NAME,...", help=f"of {', '.join(PHASES)}")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write all figures there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
