"""`python -m benchmarks.decision`: what the rules of a fence cost at each launch, in the launch loop (C) and in Python. No GPU.

A launch asks whether it goes narrow, whether it has to wait for PCIe, and charges what it moves. Neighbours rest, so that the
words of all of them are read, or the last of them is at work. The clock is not part of it: a launch reads it anyway.
"""

import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

from server.launch_loop.library import HERE
from server.launch_loop.structures import IN, MEMORY, OUT
from server.link.activity import OPEN
from server.workers.fence import at_work, exceeds
from server.workers.pace import Pace

NEIGHBOURS = (1, 14)
TIMES = 200_000
BEST = 7
RATE, MOVED, HOME, NOW = 10**12, 10**9, 500_000, 10**15
"""A work that draws twice its tenant's share."""
CODE = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "fence.h"
#include "pacing.h"
static int64_t now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ll + t.tv_nsec; }
int main(int argc, char **argv) {
    uint32_t count = atoi(argv[1]);
    volatile uint64_t *words[64];
    for (uint32_t i = 0; i < count; i++) words[i] = calloc(512, 8);
    words[count - 1][OPEN] = atoi(argv[2]);
    Neighbours n = {count, words};
    uint64_t launches = 0;
    Fence f = {1000000000000ll, &launches, n};
    Pace p = {{1000000000000ll, 1000000000000ll, 1000000000000ll}, {0}, 0, n};
    Demand d = {500000, 0, 1000000000};
    int64_t best = INT64_MAX, sum = 0, times = 2000000;
    for (int turn = 0; turn < 7; turn++) {
        int64_t began = now();
        for (int64_t i = 0; i < times; i++) {
            int64_t at = 1000000000000000ll + i * 1000;
            sum += goes_narrow(&f, &d, at) + pace_wait(&p, at);
            pace_charge(&p, at, 602112, 4000, d.moved);
        }
        int64_t took = now() - began;
        if (took < best) best = took;
    }
    fprintf(stderr, "%lld\\n", (long long)sum);
    printf("%.1f\\n", (double)best / times);
}
"""


def in_c(count: int, busy: int) -> float:
    """Nanoseconds of all rules together. Raises CalledProcessError without a compiler."""
    with tempfile.TemporaryDirectory(prefix="greenlane-decision-") as folder:
        source, program = Path(folder, "rules.c"), Path(folder, "rules")
        source.write_text(CODE)
        subprocess.run(["cc", "-O2", f"-I{HERE}", str(source), "-o", str(program)], check=True)
        return float(subprocess.run([str(program), str(count), str(busy)], capture_output=True, check=True).stdout)


def in_python(count: int, busy: int) -> float:
    """The same by the functions that a worker calls."""
    words = tuple(memoryview(bytearray(4096)).cast("Q") for _ in range(count))
    words[-1][OPEN] = busy
    pace = Pace((), RATE, RATE)
    pace.words = words

    def launch() -> None:
        if exceeds(MOVED, HOME, RATE):
            at_work(words, NOW)
        pace.wait(NOW)
        for path, nbytes in ((IN, 602_112), (OUT, 4_000), (MEMORY, MOVED)):
            pace.charge(path, nbytes, NOW)

    return min(timeit.repeat(launch, number=TIMES, repeat=BEST)) / TIMES * 1e9


def main() -> int:
    """Print a table."""
    print("neighbours  the last is   C, ns   Python, ns")
    for count in NEIGHBOURS:
        for busy in (0, 1):
            print(f"{count:10}  {'at work' if busy else 'resting':11} {in_c(count, busy):7.1f} {in_python(count, busy):12.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
