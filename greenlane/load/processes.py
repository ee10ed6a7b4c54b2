"""Load processes from the side that starts them: all begin at one moment, and what they saw is brought together.

When requests are due is decided before the first is sent, in seconds from the start of a phase, ascending: an open loop does
not wait for the server.
"""

import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from .figures import Samples, merged, percentile
from .jobs import ClosedLoop, InTurn, OpenLoop, Seen, Tally

Job = OpenLoop | ClosedLoop | InTurn
_NOTICE = 0.02
"""Seconds between the word and the start, besides what an aggressor begins ahead."""


class LoadProcessFailed(Exception):
    """A load process ended without a result; its own words say why."""


class LoadProcess:
    """One load process. `start`, `ready`, `go`, `result`, in this order; `close` whatever happened."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start the process and give it its job."""
        command = [sys.executable, "-m", f"{__package__}.process"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        assert self._process.stdin is not None
        pickle.dump(self._job, self._process.stdin)
        self._process.stdin.flush()

    def ready(self) -> None:
        """Wait until it has everything but the start. Raises LoadProcessFailed."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise self._failure()

    def go(self, start: float) -> None:
        """Report it when to begin, by `time.perf_counter`, which is one clock for all processes."""
        assert self._process.stdin is not None
        self._process.stdin.write(repr(start).encode() + b"\n")
        self._process.stdin.close()

    def stop(self) -> None:
        """Have an open loop end before its last arrival. Not before `ready`."""
        self._process.send_signal(signal.SIGUSR1)

    def result(self) -> Seen | Tally:
        """Wait for the end, and return what it saw; not for closed loops in turn. Raises LoadProcessFailed."""
        return self._result()  # type: ignore[no-any-return]

    def results(self) -> list[Tally]:
        """The same for closed loops in turn."""
        return self._result()  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process if it has not ended."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()

    def _result(self) -> Any:
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except EOFError:
            raise self._failure() from None

    def _failure(self) -> LoadProcessFailed:
        assert self._process.stderr is not None
        return LoadProcessFailed(self._process.stderr.read().decode().strip() or "it said nothing")


def run(jobs: Sequence[Job]) -> tuple[float, list[Seen | Tally]]:
    """Do these jobs at the same time; return when they began and what each came to. Blocks. Raises LoadProcessFailed."""
    with begun(jobs) as (start, processes):
        return start, [process.result() for process in processes]


@contextmanager
def begun(jobs: Sequence[Job]) -> Iterator[tuple[float, list[LoadProcess]]]:
    """Begin these jobs at the same time; gives when that is, by `perf_counter`, and their processes, killed at the block's end.

    Blocks until all are about to begin. Raises LoadProcessFailed.
    """
    started: list[LoadProcess] = []
    try:
        for job in jobs:
            process = LoadProcess(job)
            process.start()
            started.append(process)
        for process in started:
            process.ready()
        ahead = max((0.0, *(job.ahead for job in jobs if isinstance(job, ClosedLoop))))
        start = perf_counter() + ahead + _NOTICE
        for process in started:
            process.go(start)
        yield start, started
    finally:
        for process in started:
            process.close()


def together(results: Sequence[Seen | Tally]) -> tuple[Samples, list[Tally], float, int, list[bytes]]:
    """The open loops' samples as one, the closed loops' tallies, the client's own p99 delay, wrong sizes, and answers kept."""
    seen = [result for result in results if isinstance(result, Seen)]
    late = percentile(sorted(late for one in seen for late in one.late), 0.99)
    bodies = [body for one in seen for body in one.bodies]
    tallies = [result for result in results if isinstance(result, Tally)]
    return merged(one.samples for one in seen), tallies, late, sum(one.wrong for one in seen), bodies


def fixed(rate: float, seconds: float) -> list[float]:
    """Evenly spaced arrivals, `rate` of them a second, beginning half a gap after the start."""
    return [(number + 0.5) / rate for number in range(round(rate * seconds))]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrivals that do not know of each other, `rate` a second on average; the same ones for the same seed."""
    chance, now, arrivals = random.Random(seed), 0.0, []
    while (now := now + chance.expovariate(rate)) < seconds:
        arrivals.append(now)
    return arrivals


def arrivals(kind: str, rate: float, seconds: float, seed: int) -> list[float]:
    """A schedule of this kind. Raises ValueError for a kind other than `fixed` and `poisson`, or a rate that is not above 0."""
    if rate <= 0:
        raise ValueError(f"a rate of {rate} requests a second; expected more than 0")
    if kind == "fixed":
        return fixed(rate, seconds)
    if kind == "poisson":
        return poisson(rate, seconds, seed)
    raise ValueError(f"arrivals {kind!r}; expected fixed or poisson")


def share(schedule: Sequence[float], index: int, count: int) -> list[float]:
    """The share of process `index` of `count`: every count-th arrival."""
    return list(schedule[index::count])
