"""The same question without HTTP: tenants as threads of this process, each on a partition, against plain streams.

What it leaves out is all that happens between the socket and the device; what it shows is what partitions, graphs and
copies by a partition's own SMs are worth.
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from engines import Engine, load_engine
from greenlane.load import machine
from partitions import Device, Partition, open_device
from server.workers.gil_priority import GilPriorities

from . import subjects
from .arrangement import Impossible, fourth, halves
from .asks import TOLERANCE, tensor, truth
from .findings import Findings, Throughput
from .plain import open_plain
from .seat import Seat, all_at_once, at_rate, back_to_back, open_seat
from .verdicts import ALONE, CONTROL, CONTROL_ALONE, UNDER, Combination, Phase

CASES = {
    "compute": ("conv",),
    "transfer": ("image",),
    "three": ("conv", "conv", "conv"),
    "trio": ("conv", "image", "elementwise"),
}
"""The models of the aggressors in each case, one partition each."""
WHAT = {
    "compute": "batches of convolutions, back to back",
    "transfer": "batches of images of 38 MB each, back to back",
    "three": "batches of convolutions on each of three partitions of four",
    "trio": "convolutions, images of 38 MB and a model that reads 64 MB, on four partitions",
}
RATE = 400.0
BUSY = "resnet"
"""The model that all tenants run in batches of BATCH when it is measured what isolation costs."""
BATCH = 8
SWITCH_INTERVAL = 0.001
"""The server's."""
Report = Callable[[int, int, str], None]


class Arena:
    """Partitions of a device by the names of seats at them: `two 0`, `four 3`, `plain 2`. Closes what it made, in reverse."""

    def __init__(self, device: Device, root: Path, stack: ExitStack) -> None:
        self.device = device
        self._root = root
        self._stack = stack
        self._engines: dict[str, Engine] = {}
        self._partitions: dict[str, Partition] = {}
        self._seats: dict[tuple[str, str, int], Seat] = {}

    def add(self, name: str, partition: Partition) -> None:
        """One more partition."""
        self._partitions[name] = self._stack.enter_context(closing(partition))

    def seat(self, model: str, name: str, rows: int = 1) -> Seat:
        """The seat of a model at a partition; bound when it is first asked for, which blocks."""
        key = (model, name, rows)
        if key not in self._seats:
            found = open_seat(self.device, self._engine(model), self._partitions[name], tensor(model, rows))
            self._seats[key] = self._stack.enter_context(closing(found))
        return self._seats[key]

    def _engine(self, model: str) -> Engine:
        if model not in self._engines:
            path = next((self._root / model / "1").iterdir())
            self._engines[model] = self._stack.enter_context(closing(load_engine(path, self.device)))
        return self._engines[model]


def experiment(options: argparse.Namespace, report: Report) -> Findings:
    """All of it, on the device that the options name. Blocks. Raises Impossible, DeviceUnavailable, ModelRefused."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="greenlane-inside-")))
        device = stack.enter_context(closing(open_device(options.device)))
        cases = chosen(options.only, len(device.granules))
        victims = tuple(options.victim or ("resnet", "mlp"))
        models = {model for case in cases for model in CASES[case]} | {*victims, BUSY}
        report(0, 1, "building engines")
        subjects.write(root, models, device.kind == "cuda")
        arena = Arena(device, root, stack)
        groups = arrange(arena, any(map(is_crowd, cases)))
        trial = Trial(arena, options.rate or RATE, options.seconds, options.rounds, victims, cases, report)
        trial.bind()
        with quiet():
            combinations, cost = trial.run(), tuple(trial.cost(groups))
        asked = _settings(options, trial.rate, device)
        facts = machine.describe(machine.command("benchmarks.isolation"))
        title = f"Isolation inside the process: {device.describe().partition(',')[0]}"
        return Findings(title, asked, facts, tuple(combinations), WHAT, tuple(_notes(device, groups)), cost)


def chosen(only: Sequence[str] | None, granules: int) -> tuple[str, ...]:
    """The cases to try: those asked for, or all that the device has granules for. Raises Impossible."""
    cases = tuple(case for case in CASES if (case in only if only else granules >= 4 or not is_crowd(case)))
    if not cases:
        raise Impossible(f"--inside knows {', '.join(CASES)}, and not {', '.join(only or ())}")
    return cases


def arrange(arena: Arena, four: bool) -> dict[str, list[int]]:
    """Carve two partitions, four, and none; return the sizes by group. The groups overlap: only one of them works at a time."""
    device, count = arena.device, len(arena.device.granules)
    one, other = halves(device.kind, count)
    groups = {"two": [range(one), range(one, one + other)]}
    if four:
        each = fourth(device.kind, count)
        groups["four"] = [range(each * index, each * (index + 1)) for index in range(4)]
    for group, shares in groups.items():
        for index, share in enumerate(shares):
            arena.add(f"{group} {index}", device.carve(share))
    for index in range(4):
        arena.add(f"plain {index}", open_plain(device))
    return {group: [sum(device.granules[g] for g in share) for share in shares] for group, shares in groups.items()}


class Trial:
    """Victims and cases in turns on the seats of an arena."""

    def __init__(
        self,
        arena: Arena,
        rate: float,
        seconds: float,
        rounds: int,
        victims: Sequence[str],
        cases: Sequence[str],
        report: Report,
    ) -> None:
        self.rate = rate
        self._arena = arena
        self._seconds = seconds
        self._rounds = rounds
        self._victims = victims
        self._cases = cases
        self._report = report
        self._rows = subjects.ROWS if arena.device.kind == "cuda" else BATCH
        self._priorities = GilPriorities()
        self._began = perf_counter()
        self._truth = {victim: truth(victim) for victim in victims}

    def bind(self) -> None:
        """Bind everything, so that nothing is compiled while something else is measured. Blocks."""
        plan = dict.fromkeys((victim, case, kind) for victim, case, kind, _ in self._plan() if case)
        for number, (victim, case, kind) in enumerate(plan):
            self._report(number, len(plan), f"binding {victim} and {case}, {kind}")
            self._victim(victim, case, kind)
            self._aggressors(case, kind)

    def run(self) -> list[Combination]:
        """Every phase of every round."""
        plan, done = list(self._plan()), []
        for number, (victim, case, kind, turn) in enumerate(plan):
            self._report(number, len(plan), f"round {turn + 1}: {victim} / {case or 'no neighbour'}: {kind}")
            done.append((victim, case, self._phase(victim, case, kind, turn)))
        return [
            Combination(victim, case, tuple(p for v, c, p in done if v == victim and c in (case, "")), bound(victim, case))
            for victim in self._victims
            for case in self._cases
        ]

    def cost(self, groups: dict[str, list[int]]) -> Iterator[Throughput]:
        """Throughput of all tenants together when all are busy, on partitions and on plain streams, in turns."""
        for group, sizes in groups.items():
            seats = [self._arena.seat(BUSY, f"{group} {index}", BATCH) for index in range(len(sizes))]
            plain = [self._arena.seat(BUSY, f"plain {index}", BATCH) for index in range(len(sizes))]
            self._report(0, 1, f"what isolation costs {group} tenants")
            pairs = [(self._rate_of(seats), self._rate_of(plain)) for _ in range(self._rounds)]
            ours, theirs = (median(values) for values in zip(*pairs, strict=True))
            unit = self._arena.device.unit
            yield Throughput(f"{BUSY} in batches of {BATCH}, {group} tenants of {sizes} {unit}s", ours, theirs)

    def _plan(self) -> Iterator[tuple[str, str, str, int]]:
        for turn in range(self._rounds):
            for victim in self._victims:
                yield victim, "", CONTROL_ALONE, turn
                for case in self._cases:
                    yield from ((victim, case, kind, turn) for kind in (ALONE, UNDER, CONTROL))

    def _phase(self, victim: str, case: str, kind: str, turn: int) -> Phase:
        seat = self._victim(victim, case, kind)
        others = self._aggressors(case, kind) if kind in (UNDER, CONTROL) else []
        start = perf_counter() + 0.1
        until = start + self._seconds
        tasks: list[tuple[Seat, Callable[[Seat], Any]]]
        tasks = [(seat, lambda s: at_rate(s, self.rate, start, self._seconds, self._priorities))]
        tasks += [
            (other, partial(back_to_back, start=start - 0.05, until=until, priorities=self._priorities)) for other in others
        ]
        samples, *counts = all_at_once(tasks)
        names = CASES[case] if others else ()
        busy = [_busy(*row, self._seconds) for row in zip(names, others, counts, strict=True)]
        wrong = not np.allclose(seat.answer(), wanted := self._truth[victim], rtol=0, atol=TOLERANCE * np.abs(wanted).max())
        return Phase(kind, turn, start - self._began, samples, busy, wrong=int(wrong))

    def _victim(self, victim: str, case: str, kind: str) -> Seat:
        return self._arena.seat(victim, f"{_group(case, kind)} 0")

    def _aggressors(self, case: str, kind: str) -> list[Seat]:
        return [self._arena.seat(m, f"{_group(case, kind)} {i}", self._batch(m)) for i, m in enumerate(CASES[case], 1)]

    def _batch(self, model: str) -> int:
        return 1 if model == "elementwise" else self._rows

    def _rate_of(self, seats: list[Seat]) -> float:
        """Rows a second."""
        start = perf_counter() + 0.1
        until = start + self._seconds
        counts = all_at_once(
            [(seat, partial(back_to_back, start=start, until=until, priorities=self._priorities)) for seat in seats]
        )
        return float(sum(count * seat.rows for count, seat in zip(counts, seats, strict=True)) / self._seconds)


def is_crowd(case: str) -> bool:
    """Whether it takes four partitions."""
    return len(CASES.get(case, ())) == 3


def bound(victim: str, case: str) -> float:
    """The factor by which p99 may grow: an engine of half a millisecond 1.1, with three neighbours 1.2; one of 30 us, 1.5."""
    if victim == "mlp":
        return 1.5
    return 1.2 if is_crowd(case) else 1.1


@contextmanager
def quiet() -> Iterator[None]:
    """As in a server: nothing collected, and the interpreter handed on as often as there."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        sys.setswitchinterval(interval)


def _group(case: str, kind: str) -> str:
    if kind in (CONTROL, CONTROL_ALONE):
        return "plain"
    return "four" if is_crowd(case) else "two"


def _busy(model: str, seat: Seat, count: int, seconds: float) -> dict[str, Any]:
    megabytes = count * tensor(model, seat.rows).nbytes / 1e6 / seconds
    return {"name": f"{model} x{seat.rows}", "rate": count / seconds, "megabytes": megabytes}


def _settings(options: argparse.Namespace, rate: float, device: Device) -> dict[str, Any]:
    phases = f"{options.seconds:g} s, {options.rounds} rounds"
    return {
        "device": device.describe(),
        "rate": f"{rate:g} inferences a second, one at a time",
        "cores with nothing to do": "kept awake" if options.awake else "may sleep",
        "phases": phases,
    }


def _notes(device: Device, groups: dict[str, list[int]]) -> Iterator[str]:
    unit, (mine, theirs) = device.unit, groups["two"]
    yield f"Every tenant is a thread of one process on its own partition: the victim {mine} {unit}s, the aggressor {theirs}."
    if "four" in groups:
        yield f"With three aggressors: {', '.join(map(str, groups['four']))} {unit}s."
    yield "Where several have work, they give way to each other as the server's workers do (server/workers/gil_priority.py)."
    yield "Latency is from the call to the outputs in host memory; copies are part of it, on both sides."
    yield "Control: the same threads, models and graphs on plain streams of the whole device."
    yield "Figures are medians over rounds, ratios the medians of the rounds' ratios. Alone and under load take turns."
    yield "What is allowed: 1.1 times for resnet, 1.2 with three aggressors, 1.5 for the mlp of some 30 us."
