"""`python -m tests.gpu.asking PORT TENANT`: asks for one tenant until standard input ends, in a process of its own.

Threads of a test's process wait for each other's turn with the interpreter, which shows in the slowest answer. Prints one
line once it has begun, and at the end a JSON object: `answers`, each with the seconds of CLOCK_MONOTONIC when it was asked and
the milliseconds until it was there, and `wrong`, what was no right answer.
"""

import gc
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from .bench import assert_close, expected
from .networks import feed, mlp
from .process import Client

WARMING = 100
"""Answers that do not count."""


class Asked:
    """What a process has asked; `answers` and `wrong` are there after the block."""

    def __init__(self) -> None:
        self.answers: list[tuple[float, float]] = []
        self.wrong: list[str] = []

    def worst(self, begin: float, end: float) -> float:
        """The milliseconds of the slowest answer of those that were asked for in this time, by CLOCK_MONOTONIC."""
        return max(took for began, took in self.answers if begin <= began < end)


@contextmanager
def asking(port: int, tenant: str) -> Iterator[Asked]:
    """Ask for this tenant in the block."""
    command = [sys.executable, "-m", __name__, str(port), tenant]
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
    asked.answers, asked.wrong = [(began, took) for began, took in found["answers"]], found["wrong"]


def main(port: int, tenant: str) -> None:
    arrays = feed(mlp(), {"x": (1, 784)}, 7)
    wanted = expected(mlp())(arrays)
    answers, wrong = list[tuple[float, float]](), list[str]()
    gc.disable()
    with closing(Client(port)) as client:
        for _ in range(WARMING):
            client.infer("mlp", tenant, arrays)
        print("asking", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            began = time.monotonic()
            found = client.infer("mlp", tenant, arrays)
            answers.append((began, (time.monotonic() - began) * 1e3))
            try:
                assert_close(list(found.values()), wanted)
            except AssertionError as error:
                wrong.append(str(error)[:300])
    print(json.dumps({"answers": answers, "wrong": wrong}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
