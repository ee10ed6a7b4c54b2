"""What is measured: each function runs one comparison, in rounds that take turns, and gives rows of figures."""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Event, Thread
from typing import Any

import numpy as np

from engines import Work

from .driver import Load, Outcome
from .native import Latencies, percentiles
from .tenants import Tenant, Variant

Row = dict[str, Any]

WORKER, LOOP = Variant("worker", False), Variant("loop", True)
VARIANTS = (WORKER, LOOP)
HOLD = 0.2
PAUSE = 0.05
"""Seconds for which a thread holds the GIL at a time, and for which it does not."""
WARM_UP = 0.02
"""Seconds that a variant serves before it is measured."""
WARM_UPS = 100
"""How often that is repeated at most, until the loop has launched something."""
RATE = 250.0
"""Tickets a second while the interpreter is held: 64 slots last for 200 ms and more."""


def closed_loops(tenants: Sequence[Tenant], ks: Sequence[int], variants: Sequence[Variant], seconds: float) -> Iterator[Row]:
    """One round: all tenants at once, each with k tickets outstanding."""
    for k in ks:
        for variant in variants:
            yield _phase(tenants, variant, [tenant.load(k, seconds) for tenant in tenants]) | {"outstanding": k}


def disturbed(tenant: Tenant, variants: Sequence[Variant], seconds: float) -> Iterator[Row]:
    """One round: tickets at a fixed rate, while other threads of this process hold the GIL, or compute, or do nothing."""
    for name, disturbance in DISTURBANCES.items():
        for variant in variants:
            with disturbance():
                row = _phase([tenant], variant, [tenant.load(tenant.slots, seconds, RATE)])
            yield row | {"beside": name}


def bare(tenant: Tenant, ks: Sequence[int], seconds: float) -> Iterator[Row]:
    """One round: the engine without a link, k works ahead."""
    for k in ks:
        began = time.process_time()
        count, latencies = tenant.on_thread(partial(_python_bare, tenant, k, seconds))
        cpu = time.process_time() - began
        yield _row([tenant], "engine", count / seconds, latencies, cpu / max(1, count)) | {"outstanding": k}


def _phase(tenants: Sequence[Tenant], variant: Variant, loads: Sequence[Load]) -> Row:
    """All tenants at once, served by this variant."""
    with ExitStack() as stack:
        for tenant in tenants:
            stack.enter_context(tenant.served_by(variant))
        for tenant in tenants:
            _warm_up(tenant, variant)
        began = time.process_time()
        for tenant, load in zip(tenants, loads, strict=True):
            tenant.driver.start(load)
        outcomes = [tenant.driver.finish() for tenant in tenants]
        cpu = time.process_time() - began
    taken = sum(outcome.taken for outcome in outcomes)
    rate = sum(outcome.counted / load.seconds for outcome, load in zip(outcomes, loads, strict=True))
    worst = Latencies(*[max(getattr(outcome, name) for outcome in outcomes) for name in Latencies._fields])
    row = _row(tenants, variant.name, rate, worst, cpu / max(1, taken))
    row["flaw"] = "; ".join(_flaws(tenants, outcomes))
    if variant.loop and not all(tenant.looped for tenant in tenants):
        row["flaw"] += "; the launch loop launched nothing"
    return row


def _warm_up(tenant: Tenant, variant: Variant) -> None:
    """Serve until threads have started and the loop knows the shapes, which takes several turns on a busy host."""
    before = tenant.model.launched
    for _ in range(WARM_UPS):
        tenant.driver.run(tenant.load(1, WARM_UP))
        if not variant.loop or tenant.model.launched > before:
            return


def _flaws(tenants: Sequence[Tenant], outcomes: Sequence[Outcome]) -> Iterator[str]:
    for tenant, outcome in zip(tenants, outcomes, strict=True):
        if outcome.flaw:
            yield outcome.flaw
        if wrong := tenant.wrong(outcome.slots):
            yield f"{wrong} of {len(outcome.slots)} answers were wrong"


def _row(tenants: Sequence[Tenant], variant: str, rate: float, latencies: Latencies, cpu: float) -> Row:
    """Works a second of all tenants; latencies of the worst, and CPU time of this process for each work, in microseconds."""
    return {
        "model": tenants[0].model.name,
        "tenants": len(tenants),
        "variant": variant,
        "rate": rate,
        **latencies._asdict(),
        "cpu": cpu * 1e6,
        "flaw": "",
    }


def _python_bare(tenant: Tenant, k: int, seconds: float) -> tuple[int, Latencies]:
    """`Executor.enqueue` and `Work.wait`, k works ahead."""
    executor, asks = tenant.model.executor, [tenant.ask(slot) for slot in range(k)]
    works: deque[tuple[Work, int]] = deque()
    latencies: list[int] = []
    until, number = time.monotonic_ns() + int(seconds * 1e9), 0
    while (now := time.monotonic_ns()) < until:
        if len(works) == k:
            work, began = works.popleft()
            work.wait()
            latencies.append(time.monotonic_ns() - began)
            now = time.monotonic_ns()
        works.append((executor.enqueue(*asks[number % k]), now))
        number += 1
    for work, _ in works:
        work.wait()
    return len(latencies), percentiles(np.array(latencies, np.int64))


@contextmanager
def _beside(step: Callable[[], object]) -> Iterator[None]:
    """Another thread calls it again and again during the block."""
    stop = Event()

    def run() -> None:
        while not stop.is_set():
            step()

    thread = Thread(target=run, name="disturbance")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _hold_gil() -> None:
    ctypes.PyDLL(None).usleep(int(HOLD * 1e6))  # A call through PyDLL keeps the GIL.
    time.sleep(PAUSE)


def _compute() -> None:
    sum(number * number for number in range(10_000))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


DISTURBANCES: dict[str, Callable[[], Any]] = {
    "alone": _nothing,
    "GIL held 200 ms at a time": lambda: _beside(_hold_gil),
    "Python computes": lambda: _beside(_compute),
}
