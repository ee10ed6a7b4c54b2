"""`python -m tests.gpu.asking PORT TENANT PAUSE`: asks for one tenant until standard input ends, in a process of its own.

Threads of a test's process wait for each other's turn with the interpreter, which shows in the slowest answer. Prints one
line once it has begun, and at the end a JSON object: `answers`, each with the seconds of CLOCK_MONOTONIC when it was asked and
the milliseconds until it was there, `refused`, when was asked what was not answered with 200, and `wrong`, what was no right
answer, refused or not.
"""

import gc
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from greenlane.load.wire import Broken

from .bench import assert_close, expected
from .networks import feed, mlp
from .process import Client

WARMING = 100
"""Answers that do not count."""
REST = 0.005
"""Seconds until it asks again after a refusal."""


class Asked:
    """What a process has asked; `answers`, `refused` and `wrong` are there after the block."""

    def __init__(self) -> None:
        self.answers: list[tuple[float, float]] = []
        self.refused: list[float] = []
        self.wrong: list[str] = []

    def during(self, begin: float, end: float) -> list[float]:
        """The milliseconds of the answers that were asked for in this time, by CLOCK_MONOTONIC."""
        return [took for began, took in self.answers if begin <= began < end]

    def worst(self, begin: float, end: float) -> float:
        """Of these the slowest."""
        return max(self.during(begin, end))

    def again(self) -> float:
        """When the first answer after the last refusal was there, by CLOCK_MONOTONIC."""
        return min(began + took / 1e3 for began, took in self.answers if began > self.refused[-1])


@contextmanager
def asking(port: int, tenant: str, pause: float = 0.0) -> Iterator[Asked]:
    """Ask for this tenant in the block, with so many seconds after each answer."""
    command = [sys.executable, "-m", __name__, str(port), tenant, str(pause)]
    asked = Asked()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == "asking\n"
        try:
            yield asked
        finally:
            process.stdin.close()
            found = json.loads(process.stdout.read())
    asked.answers = [(began, took) for began, took in found["answers"]]
    asked.refused, asked.wrong = found["refused"], found["wrong"]


def main(port: int, tenant: str, pause: float) -> None:
    arrays = feed(mlp(), {"x": (1, 784)}, 7)
    wanted = expected(mlp())(arrays)
    answers, refused, wrong = list[tuple[float, float]](), list[float](), list[str]()
    gc.disable()
    client = Client(port)
    for _ in range(WARMING):
        client.infer("mlp", tenant, arrays)
    print("asking", flush=True)
    rest = 0.0
    while not select.select([sys.stdin], [], [], rest)[0]:
        began, rest = time.monotonic(), pause
        try:
            found = client.infer("mlp", tenant, arrays)
            answers.append((began, (time.monotonic() - began) * 1e3))
        except (AssertionError, Broken) as error:
            client.close()
            client, rest = Client(port), REST
            refused.append(began)
            wrong.append(f"refused: {error!r}"[:300])
            continue
        try:
            assert_close(list(found.values()), wanted)
        except AssertionError as error:
            wrong.append(str(error)[:300])
    client.close()
    print(json.dumps({"answers": answers, "refused": refused, "wrong": wrong}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
