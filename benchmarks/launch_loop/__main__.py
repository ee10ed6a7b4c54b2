"""`python -m benchmarks.launch_loop`: tickets served by a worker with the launch loop and one without, in turns, on one link.

A process of its own plays the HTTP side. `--device fake` tries everything without a GPU; its figures mean nothing. After each
comparison everything so far is written to `--output`. The exit status is 1 if an answer was wrong or missing.
"""

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.inside import quiet
from greenlane.load import machine
from greenlane.options import count, positive
from server.workers import worker
from server.workers.gil_priority import GilPriorities

from ..options import named
from . import measures
from .measures import VARIANTS, Row
from .on_cuda import CudaBench
from .on_fake import FakeBench
from .tenants import Tenant

MODELS = ("tiny", "mob", "enc")
BRIEF = ("tiny", "mob")
"""Those that are disturbed."""
SECTIONS = ("closed", "disturbed")
KS = (1, 2, 8, 32)
SLOTS = 64
_KEYS = ("model", "beside", "outstanding", "variant")
_FIGURES = ("rate", "p50", "p99", "p999", "most", "cpu")


class Run:
    """The comparisons of one command line, and the rows that they gave so far."""

    def __init__(self, options: argparse.Namespace, bench: CudaBench | FakeBench) -> None:
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self._options = options
        self._bench = bench
        self._began = perf_counter()
        self._facts = machine.describe(machine.command("benchmarks.launch_loop")) | {
            "device": bench.device.describe(),
            "worker": "compiled" if (worker.__file__ or "").endswith(".so") else "Python",
        }

    def all(self) -> None:
        """Every comparison that was asked for. What goes wrong in one is noted, and the next is tried. Blocks."""
        with quiet():
            whole = self._bench.carve(range(len(self._bench.device.granules)))
            for name in self._options.models:
                self._tried(name, whole)

    def _tried(self, name: str, partition: Any) -> None:
        try:
            model = self._bench.bind(name, partition)
            self._progress(f"{name} is bound")
            with closing(Tenant(self._bench.device, model, SLOTS, GilPriorities())) as tenant:
                self._measure(tenant)
        except Exception:
            self.failures.append(f"{name}: {traceback.format_exc()}")
            self._progress(self.failures[-1])

    def _measure(self, tenant: Tenant) -> None:
        seconds = self._options.seconds
        self._rounds("closed", lambda: measures.closed_loops(tenant, KS, VARIANTS, seconds))
        if tenant.model.name in BRIEF:
            self._rounds("disturbed", lambda: measures.disturbed(tenant, VARIANTS, 5 * seconds), 1)

    def _rounds(self, section: str, measure: Callable[[], Iterator[Row]], rounds: int = 0) -> None:
        if section not in self._options.only:
            return
        for number in range(rounds or self._options.rounds):
            if perf_counter() - self._began > self._options.within:
                self._progress(f"{section}: round {number + 1} is left out, --within has passed")
                return
            self.rows += [{"section": section, "round": number} | row for row in measure()]
        self._progress(f"{section} of {self.rows[-1]['model']} is done")
        self.write()

    def write(self) -> None:
        """Write everything so far."""
        if self._options.output:
            found = {"machine": self._facts, "failures": self.failures, "medians": medians(self.rows), "rows": self.rows}
            self._options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def _progress(self, text: str) -> None:
        print(f"{perf_counter() - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)


def medians(rows: Sequence[Row]) -> list[Row]:
    """One row for each variant: medians over rounds, and what was wrong in any."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["section"], *(row.get(key) for key in _KEYS)), []).append(row)
    found = []
    for group in groups.values():
        first = {key: group[0][key] for key in ("section", *_KEYS) if key in group[0]}
        figures = {key: median(row[key] for row in group) for key in _FIGURES if key in group[0]}
        found.append(first | figures | {"rounds": len(group), "flaw": "; ".join(row["flaw"] for row in group if row["flaw"])})
    return found


def table(found: Sequence[Row]) -> str:
    """For people: one line for each variant; latencies in microseconds."""
    lines, before = [], ""
    for row in found:
        title = f"{row['section']}: {row['model']}"
        if title != before:
            lines += ["", title, f"{'':26} {'':24} {'1/s':>9} {'p50':>9} {'p99':>9} {'p99.9':>9} {'CPU us':>8}"]
            before = title
        what = row.get("beside") or ""
        what += f"k = {row['outstanding']}" if "outstanding" in row else ""
        figures = f"{row['rate']:9,.0f} {row['p50']:9,.1f} {row['p99']:9,.1f} {row['p999']:9,.1f} {row['cpu']:8,.1f}"
        lines.append(f"{what:26} {row['variant']:24} {figures} {row['flaw']}".rstrip())
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status."""
    options = _parser().parse_args(arguments)
    with ExitStack() as stack:
        folder = options.repository or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="greenlane-loop-")))
        bench = stack.enter_context(closing(FakeBench() if options.device == "fake" else CudaBench(folder)))
        run = Run(options, bench)
        try:
            run.all()
        finally:
            run.write()
            print(table(medians(run.rows)), *run.failures, sep="\n")
    return int(bool(run.failures) or any(row["flaw"] for row in run.rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launch_loop", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--seconds", type=positive, default=0.3, help="length of a phase; default: 0.3")
    parser.add_argument("--rounds", type=count, default=3, help="default: 3")
    parser.add_argument("--within", type=positive, default=170.0, help="seconds after which no round begins; default: 170")
    parser.add_argument("--models", type=named(MODELS), default=MODELS, metavar="NAME,...", help="default: all")
    parser.add_argument("--only", type=named(SECTIONS), default=SECTIONS, metavar="NAME,...", help="default: all")
    parser.add_argument("--repository", type=Path, metavar="DIR", help="keep models, and what is compiled for them, here")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write all figures there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
