"""`python -m benchmarks.change`: what a tenant that is not concerned feels while something changes.

A server with three tenants is asked over HTTP by an open loop each, while another tenant's share, models, batches or bodies
change; before each change there is a quiet phase of the same clients, which it is compared with. Cold starts and the depth
of the stream are measured after it. The goals are those of benchmarks/goals.py. The exit status is 0 if none was missed.

With `--mps` each tenant has a device process. The depth, which is measured in one process without a server, is left out then.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from os import sched_getaffinity
from pathlib import Path
from time import perf_counter

from greenlane.load import machine
from greenlane.options import count, positive

from . import nets
from .bench import Bench, opened, share_out
from .changes import CHANGES
from .cold import cold_starts
from .goals import GOALS, MISSED, Row
from .options import named
from .outcomes import Outcome, as_json, failed, judge_all, progress, table

PHASES = (*CHANGES, "depth", "cold")
UNDER_MPS = tuple(name for name in PHASES if name != "depth")
MOST = {"repartition": 6.5, "reload": 3.0, "cold": 8.0}
"""How many times `--seconds` a phase may go on for; 1 where nothing is said."""
_PATIENCE = 240.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 0 where every goal that was tried was met, 1 where one was missed."""
    options = _parser().parse_args(arguments)
    began = perf_counter()
    outcomes: dict[str, Outcome] = {}
    facts = machine.describe(machine.command("benchmarks.change"))
    with _folder(options.repository) as repository, tempfile.TemporaryDirectory(prefix="greenlane-change-") as folder:
        runs = Runs(options, repository, Path(folder), began + options.within)
        for name, outcome in runs.all():
            outcomes[name] = outcome
            rows = judged(outcomes, runs.quiet_worst, runs.phases)
            progress(f"{name}: {perf_counter() - began:.0f} s so far{''.join(f'; {flaw}' for flaw in outcome.flaws)}")
            if options.output:  # After every phase, as whatever ends this process leaves those that were done.
                options.output.write_text(json.dumps(as_json(facts, outcomes, rows), indent=2) + "\n", encoding="utf-8")
    rows = judged(outcomes, runs.quiet_worst, runs.phases)
    print(table(facts, outcomes, rows))
    return int(any(row.verdict == MISSED for row in rows))


class Runs:
    """The phases that were asked for, one after the other. Whatever goes wrong in one is its flaw, and the next is tried."""

    def __init__(self, options: argparse.Namespace, repository: Path, folder: Path, until: float) -> None:
        self.quiet_worst: dict[str, float] = {}
        self.phases = UNDER_MPS if options.mps else PHASES
        self._mps = "on" if options.mps else "off"
        self._options = options
        self._repository = repository
        self._folder = folder
        self._until = until

    def all(self) -> Iterator[tuple[str, Outcome]]:
        """The outcome of each phase. Blocks."""
        asked = [name for name in self.phases if name in self._options.only]
        changes = [name for name in asked if name in CHANGES]
        if changes:
            yield from self._on_a_server(changes)
        for name, run in (("depth", self._depth), ("cold", self._cold)):
            if name in asked:
                yield name, self._tried(name, run)

    def _on_a_server(self, names: list[str]) -> Iterator[tuple[str, Outcome]]:
        """These changes; a server that ended is started again for those that are left."""
        options, left = self._options, list(names)
        while left:
            served = False
            try:
                with opened(options.device, self._folder, self._repository, options.seconds, mps=self._mps) as bench:
                    while left:
                        served = True
                        name = left.pop(0)
                        yield name, self._tried(name, lambda name=name, bench=bench: self._change(name, bench))  # type: ignore[misc]
                        bench.check()
            except Exception:
                failure = failed()
                while left and not served:  # It would not start the next time either.
                    yield left.pop(0), failure

    def _change(self, name: str, bench: Bench) -> Outcome:
        try:
            return CHANGES[name](bench, self._options.puts, self._most(name))
        finally:
            for tenant, worst in bench.quiet_worst.items():
                self.quiet_worst[tenant] = max(worst, self.quiet_worst.get(tenant, 0.0))

    def _tried(self, name: str, run: Callable[[], Outcome]) -> Outcome:
        if self._until - perf_counter() < self._options.seconds * 2:
            return Outcome(unexercised="there was no time left (--within)")
        progress(name)
        try:
            return run()
        except Exception:
            return failed()

    def _most(self, name: str) -> float:
        """The seconds that a phase may go on for."""
        wanted = self._options.seconds * MOST.get(name, 1)
        most: float = max(1.0, min(wanted, self._until - perf_counter() - self._options.seconds))
        return most

    def _depth(self) -> Outcome:
        nets.write_all(self._repository, self._options.device)
        command = ["-m", "benchmarks.depth", "--device", self._options.device, "--repository", str(self._repository)]
        command += ["--seconds", str(min(2.0, self._options.seconds))]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=_PATIENCE)
        if done.returncode:
            return Outcome(flaws=[done.stderr.strip()[-1500:]])
        outcome = Outcome(figures=json.loads(done.stdout))
        for name, figures in outcome.figures.items():
            outcome.value("ratio", name, figures["ratio"])
            if figures["wrong"]:
                outcome.flaws.append(f"{figures['wrong']} answers of {name} were wrong")
        return outcome

    def _cold(self) -> Outcome:
        options = self._options
        until = perf_counter() + self._most("cold")
        cores = share_out(sorted(sched_getaffinity(0)))
        starts = cold_starts(options.device, self._folder / "cold", options.colds, until, cores, progress, self._mps)
        outcome = Outcome(figures={"starts": [asdict(start) for start in starts]})
        outcome.value("ready", f"{len(starts)} starts", sum(start.ready for start in starts) / len(starts))
        if len(starts) < options.colds:
            outcome.flaws.append(f"only {len(starts)} of {options.colds} cold starts were begun in time")
        return outcome


def judged(outcomes: Mapping[str, Outcome], quiet_worst: Mapping[str, float], phases: Sequence[str] = PHASES) -> list[Row]:
    """A row for every goal of these phases."""
    return judge_all([goal for goal in GOALS if goal.phase in phases], phases, outcomes, quiet_worst)


@contextmanager
def _folder(asked: Path | None) -> Iterator[Path]:
    if asked:
        asked.mkdir(parents=True, exist_ok=True)
        yield asked
        return
    with tempfile.TemporaryDirectory(prefix="greenlane-change-models-") as made:
        yield Path(made)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.change", description="What is felt while something changes.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument(
        "--seconds", type=positive, default=15.0, help="length of a quiet phase, and of most changes; default: 15"
    )
    parser.add_argument("--mps", action="store_true", help="a device process for each tenant; with --device cuda")
    parser.add_argument("--puts", type=count, default=50, help="repartitions; default: 50")
    parser.add_argument("--colds", type=count, default=10, help="cold starts; default: 10")
    parser.add_argument("--within", type=positive, default=460.0, help="seconds; what does not fit is not done; default: 460")
    parser.add_argument("--only", type=named(PHASES), default=PHASES, metavar="NAME,...", help=f"of {', '.join(PHASES)}")
    parser.add_argument("--repository", type=Path, metavar="DIR", help="keep models, and what is compiled for them, here")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write all figures there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
