"""What is measured: each function runs one comparison, in rounds that take turns, and gives rows of figures."""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from .driver import Load, Outcome
from .native import Latencies
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


def closed_loops(tenant: Tenant, ks: Sequence[int], variants: Sequence[Variant], seconds: float) -> Iterator[Row]:
    """One round: k tickets outstanding."""
    for k in ks:
        for variant in variants:
            yield _phase(tenant, variant, tenant.load(k, seconds)) | {"outstanding": k}


def disturbed(tenant: Tenant, variants: Sequence[Variant], seconds: float) -> Iterator[Row]:
    """One round: tickets at a fixed rate, while other threads of this process hold the GIL, or compute, or do nothing."""
    for name, disturbance in DISTURBANCES.items():
        for variant in variants:
            with disturbance():
                row = _phase(tenant, variant, tenant.load(tenant.slots, seconds, RATE))
            yield row | {"beside": name}


def _phase(tenant: Tenant, variant: Variant, load: Load) -> Row:
    """Works a second, latencies, and CPU time of this process for each work, in microseconds, while this variant serves."""
    with tenant.served_by(variant):
        _warm_up(tenant, variant)
        began = time.process_time()
        outcome = tenant.driver.run(load)
        cpu = time.process_time() - began
    flaw = "; ".join(_flaws(tenant, outcome))
    if variant.loop and not tenant.looped:
        flaw += "; the launch loop launched nothing"
    return {
        "model": tenant.model.name,
        "variant": variant.name,
        "rate": outcome.counted / load.seconds,
        **{name: getattr(outcome, name) for name in Latencies._fields},
        "cpu": cpu / max(1, outcome.taken) * 1e6,
        "flaw": flaw,
    }


def _warm_up(tenant: Tenant, variant: Variant) -> None:
    """Serve until threads have started and the loop knows the shapes, which takes several turns on a busy host."""
    before = tenant.model.launched
    for _ in range(WARM_UPS):
        tenant.driver.run(tenant.load(1, WARM_UP))
        if not variant.loop or tenant.model.launched > before:
            return


def _flaws(tenant: Tenant, outcome: Outcome) -> Iterator[str]:
    if outcome.flaw:
        yield outcome.flaw
    if wrong := tenant.wrong(outcome.slots):
        yield f"{wrong} of {len(outcome.slots)} answers were wrong"


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
