"""Measure one share: carve it, bind the models to it, and drive them from one thread of the partition. Blocks.

As a worker of the server does, the thread has up to `depth` works on the stream: one where it runs them itself, as on cores,
else two. Requests that are due wait in order. They are not joined to batches.
"""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Event
from typing import Literal

from engines import Work
from greenlane.load.figures import percentile
from partitions import Device, Partition, PartitionError
from partitions.cuda.nvml import Nvml
from server.accounts.usage import Moved

from .options import Target
from .points import ROUND, AtRate, Drawn, Point, Word, judge, p99, tolerated
from .subject import Source

Enqueue = Callable[[], Work]
"""Puts the next request on the partition's stream."""

Ended = Literal["overloaded", "misses"] | None
"""Why requests were not sent any more."""

_SPUN = 200e-6
"""Seconds before a request is due from which the thread does not sleep: timers are late by up to so much."""


def back_to_back(enqueue: Enqueue, depth: int, seconds: float, least: int) -> float:
    """Requests a second with `depth` of them always on the stream, for so long and at least so many. Blocks."""
    flights = deque(enqueue() for _ in range(depth))
    flights.popleft().wait()
    began, done = time.perf_counter(), 0
    while done < least or time.perf_counter() - began < seconds:
        flights.append(enqueue())
        flights.popleft().wait()
        done += 1
    took = time.perf_counter() - began
    for work in flights:
        work.wait()
    return done / took


def alone(enqueue: Enqueue, seconds: float, least: int) -> list[float]:
    """The seconds that each of many requests takes, one after another. Blocks."""
    found: list[float] = []
    ends = time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < ends:
        began = time.perf_counter()
        enqueue().wait()
        found.append(time.perf_counter() - began)
    return found


def when_due(
    enqueue: Enqueue, depth: int, arrivals: Sequence[float], limit: float, tolerated: int, patience: float
) -> tuple[Ended, list[float]]:
    """The latency of requests that are due at these seconds from now, in order, from when each was due. Blocks.

    Ends early where it is clear that they are too many: "overloaded" when one took longer than `patience`, "misses" when more
    than `tolerated` took longer than `limit`. None: all were sent.
    """
    ended: Ended = None
    found: list[float] = []
    flights: deque[tuple[Work, float]] = deque()
    slower, start = 0, time.perf_counter()
    for due in (start + arrival for arrival in arrivals):
        while flights and (len(flights) >= depth or time.perf_counter() < due):
            latency = _end(flights)
            found.append(latency)
            slower += latency > limit
        if found and found[-1] > patience:
            ended = "overloaded"
        elif slower > tolerated:
            ended = "misses"
        if ended:
            break
        _sleep_until(due)
        flights.append((enqueue(), due))
    while flights:
        found.append(_end(flights))
    return ended, found


def _end(flights: deque[tuple[Work, float]]) -> float:
    """Wait for the oldest work; its latency."""
    work, due = flights.popleft()
    work.wait()
    return time.perf_counter() - due


def _sleep_until(due: float) -> None:
    left = due - time.perf_counter()
    if left > _SPUN:
        time.sleep(left - _SPUN)
    while time.perf_counter() < due:
        pass


Bind = Callable[[Partition, ExitStack], Sequence[Source]]
"""Binds what is measured to a partition, and puts on the stack what closes it."""

_PART = 0.1
"""The part of the time of a share that is for requests back to back, and the same again for requests alone."""

_LEAST = 20
"""Requests of each of these at least."""

_WARM, _COUNTED = 0.3, 0.5
"""Seconds of requests back to back before they are counted, as NVML's values are up to 0.1 s old, and at least while they are:
over 0.25 s the values are right within 2 % (H100).
"""

_PATIENCE = 20.0
"""A request that takes this many times the target, and at least _LONG seconds, shows that a share is overloaded."""

_LONG = 1.0
_NEAR, _STALL = 0.8, 10.0
"""That holds from this part of the throughput on. Below it a queue so long comes of a stall of the machine: then seconds."""


class Interrupted(Exception):
    """Measuring was stopped."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure each share, in seconds, and the seed of arrivals and of the choice among models; and what counts the
    bytes that are moved, None to leave that out.

    Once `interrupted` is set no more requests are sent, and Interrupted is raised.
    """

    seconds: float = 10.0
    seed: int = 0
    interrupted: Event = field(default_factory=Event)
    counters: Nvml | None = None


def measure(
    device: Device, granules: int, bind: Bind, weights: Sequence[float], target: Target | None, effort: Effort
) -> Point:
    """Measure the first `granules` granules. Requests go to the models at random, by these weights.

    Raises PartitionError, ModelRefused, ExecutionFailed, Interrupted.
    """
    with ExitStack() as stack:
        partition = stack.enter_context(closing(device.carve(range(granules))))
        sources = bind(partition, stack)
        depth = 2 if partition.host_cores is None else 1
        try:
            return partition.run(lambda: _measure(partition, sources, depth, weights, target, effort))
        finally:
            for source in sources:
                source.drain()


def _measure(
    partition: Partition, sources: Sequence[Source], depth: int, weights: Sequence[float], target: Target | None, effort: Effort
) -> Point:
    for source in sources:  # Kernels may be compiled for these shapes, and memory allocated.
        for _ in range(3):
            source.enqueue().wait()
    choose = mixed(sources, weights, effort.seed)

    def enqueue() -> Work:
        if effort.interrupted.is_set():
            raise Interrupted
        return choose()

    part = _PART * effort.seconds
    throughput, drawn = counted(enqueue, depth, part, effort.counters)
    single = sorted(alone(enqueue, part, _LEAST))
    found = measure_at(enqueue, depth, throughput, target, effort) if target else None
    granules = len(partition.granules)
    return Point(granules, partition.size, throughput, percentile(single, 0.5), percentile(single, 0.99), found, drawn)


def counted(enqueue: Enqueue, depth: int, seconds: float, counters: Nvml | None) -> tuple[float, Drawn | None]:
    """Requests a second back to back, and what they drew if there are counters, which takes longer. Blocks.

    Raises PartitionError if the counters cannot be read.
    """
    if counters is None:
        return back_to_back(enqueue, depth, seconds, _LEAST), None
    back_to_back(enqueue, depth, _WARM, 1)
    traffic, began = counters.traffic(time.perf_counter), time.perf_counter()
    throughput = back_to_back(enqueue, depth, max(seconds, _COUNTED), _LEAST)
    found = traffic.read() if traffic else {}
    if not (traffic and found):
        raise PartitionError("--bandwidth: the GPU's counters of what it moves cannot be read any more")
    took, link = time.perf_counter() - began, counters.link()
    rates = Moved(**{path: round(moved / took) for path, moved in found.items()})
    each = Moved(*(round(rate / throughput) for rate in rates))
    pcie = max(rates.pcie_in, rates.pcie_out) / link if link else 0.0
    return throughput, Drawn(each, rates, rates.memory / traffic.bandwidth, pcie)


def measure_at(enqueue: Callable[[], Work], depth: int, throughput: float, target: Target, effort: Effort) -> AtRate:
    """Requests at the rate, in rounds that grow until it is clear whether they keep the target, or the time is over."""
    if throughput < target.rate:
        return AtRate(target.rate, "overloaded")
    latencies: list[float] = []
    most = max(1, requests_at(target.rate, effort.seconds))
    limit = target.p99 or math.inf
    near = target.rate > _NEAR * throughput
    patience = max(_LONG, _PATIENCE * (target.p99 or 0.0)) if near else _STALL
    count = ROUND if target.p99 else most
    word: Word = "too few"
    while count > 0 and word in ("too few", "too noisy"):
        schedule = arrivals(target.rate, min(count, most - len(latencies)), effort.seed + len(latencies))
        left = tolerated(most) - sum(latency > limit for latency in latencies)
        ended, found = when_due(enqueue, depth, schedule, limit, left, patience)
        latencies += found
        word = ended or judge(latencies, target.p99)
        if ended == "misses" and p99(latencies).low <= limit:  # They came in groups, as after a stall of the machine.
            word = "too noisy"
            break
        count = min(len(latencies), most - len(latencies))
    p50 = percentile(sorted(latencies), 0.5)
    return AtRate(target.rate, word, p50, p99(latencies)) if latencies else AtRate(target.rate, word)


def requests_at(rate: float, seconds: float) -> int:
    """How many requests are sent at a rate when a share is measured for so long."""
    return int(rate * (1 - 2 * _PART) * seconds)


def seconds_for(requests: int, rate: float) -> int:
    """For how long to measure a share so that so many requests are sent at a rate."""
    return math.ceil(requests / rate / (1 - 2 * _PART) + 0.001)


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """When so many requests are due that do not know of each other (Poisson), in seconds; the same ones for the same seed."""
    chance = random.Random(seed)
    return list(accumulate(chance.expovariate(rate) for _ in range(count)))


def mixed(sources: Sequence[Source], weights: Sequence[float], seed: int) -> Callable[[], Work]:
    """Enqueues requests of these models at random, the same ones for the same seed."""
    if len(sources) == 1:
        return sources[0].enqueue
    chance, bounds = random.Random(seed), list(accumulate(weights))
    return lambda: chance.choices(sources, cum_weights=bounds)[0].enqueue()
