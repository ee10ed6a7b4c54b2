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


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrivals that do not know of each other, `rate` a second on average; the same ones for the same seed."""
    chance, now, arrivals = random.Random(seed), 0.0, []
    while (now := now + chance.expovariate(rate)) < seconds:
        arrivals.append(now)
    return arrivals
