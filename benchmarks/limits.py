"""`python -m benchmarks.limits`: what a check of a tenant's limits costs.

It is CPU time of the thread, so what else runs on the machine matters little. Times `Lane.charge` for a request of 1000 bytes
that is admitted, which is what `Lane.admit` adds for a tenant with limits: the clock, the bucket of requests and that of bytes.
For a tenant with several HTTP processes the buckets are on a page that they share, behind a lock of the kernel's, which a
process takes once for a lot of tokens, or for each request where the rate is too low for lots. Prints the median and the range
of the rounds, in microseconds a call.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from server.link import occupancy, ring
from server.link.occupancy import LEAD, Occupancy
from server.scheduling import limits
from server.scheduling.lane import Lane
from server.scheduling.limits import RateLimits, SharedRateLimits, TokenBucket
from server.scheduling.scheduler import Scheduler

_MEMORY = 1 << 20
_PLENTY = 1 << 40
"""A second, so that nothing is refused."""
_BODY = 1000


_FAST, _SLOW = 20_000, 99
"""Requests a second: with lots of 200, and without lots."""


def _bucket(rate: int = _PLENTY) -> TokenBucket:
    return TokenBucket(rate, _PLENTY)


def _lane(stack: ExitStack, of: RateLimits | None) -> Lane:
    descriptors = ring.create(4, _MEMORY)
    stack.callback(descriptors.close)
    lane = Lane("acme", Scheduler(4, 1), ring.attach(descriptors), _NoCanceller())
    lane.admission.limits = of
    return lane


def _shared(stack: ExitStack, rate: int) -> SharedRateLimits:
    page = occupancy.create(_MEMORY)
    stack.callback(os.close, page)
    buckets, view = (_bucket(rate), _bucket(rate * _BODY)), Occupancy(page, LEAD)
    for index, bucket in enumerate(buckets):  # Full at once, whenever the machine was started.
        view.set_bucket(index, bucket.level, time.monotonic_ns() // 1000)
    return SharedRateLimits("acme", *buckets, view)


class _NoCanceller:
    def cancel(self, slot: int, serial: int) -> None:
        """Nothing is ever cancelled here."""


def _microseconds(call: Callable[[int, int], None], count: int) -> float:
    """CPU time of this thread for a call."""
    begun = time.thread_time_ns()
    for _ in range(count):
        call(1, _BODY)
    return (time.thread_time_ns() - begun) / count / 1000


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(prog="benchmarks.limits", description=__doc__)
    parser.add_argument("--count", type=int, default=200_000, help="calls in a round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        cases = {
            "no limits": _lane(stack, None),
            "one process": _lane(stack, RateLimits("acme", _bucket(), _bucket())),
            f"several processes, {_FAST} requests a second": _lane(stack, _shared(stack, _FAST)),
            f"several processes, {_SLOW} requests a second": _lane(stack, _shared(stack, _SLOW)),
        }
        compiled = limits.__file__.endswith(".so")
        load = " ".join(f"{each:.1f}" for each in os.getloadavg())
        print(f"{options.rounds} rounds of {options.count} calls, {'' if compiled else 'not '}compiled, load {load}")
        for name, lane in cases.items():
            found = sorted(_microseconds(lane.admission.charge, options.count) for _ in range(options.rounds))
            print(f"{name}: {statistics.median(found):.2f} us ({found[0]:.2f} to {found[-1]:.2f})")


if __name__ == "__main__":
    main()
