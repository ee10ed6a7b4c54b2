"""`python -m tests.benchmarks.spinner COUNT CORE,CORE GRANULE,GRANULE`: so many processes that only compute, on a partition.

Prints a line once they do. They end when this one's standard input does.
"""

import os
import signal
import sys

from partitions.cpu import open_cpu


def main() -> None:
    count, cores, granules = (list(map(int, argument.split(","))) for argument in sys.argv[1:])
    open_cpu(cores).carve(granules).attach()
    children = [spin() for _ in range(count[0])]
    try:
        sys.stdout.write("spinning\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def spin() -> int:
    """The id of a process that computes until it is killed."""
    if child := os.fork():
        return child
    while True:
        pass


if __name__ == "__main__":
    main()
