"""What the GPU's own timer says of works, against events on the stream, which are the driver's view."""

import time
import timeit
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from engines import RuntimeSettings, load_engine
from engines.memory import view
from partitions import Device

from .bench import tensors
from .networks import NETWORKS, feed, plan

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
WORKS = 2000
ROUNDS = 10
NS = 10**9


@pytest.fixture
def executor(device: Device, tmp_path: Path) -> Any:
    network = NETWORKS["resnet"]()
    with ExitStack() as stack:
        settings = RuntimeSettings(copies="sm")
        engine = stack.enter_context(closing(load_engine(plan(tmp_path, network), device, settings)))
        partition = stack.enter_context(closing(device.carve([0, 1])))
        executor: Any = stack.enter_context(closing(engine.bind(partition)))
        executor.test_network = network
        partition.attach()
        yield executor


def inputs(executor: Any) -> Any:
    network = executor.test_network
    return tensors(executor.engine, network, feed(network, network.tries[0], 0))


def test_the_timer_agrees_with_the_host_so_that_it_is_used(executor: Any) -> None:
    assert executor.device_time is not None


def test_works_back_to_back_take_what_the_driver_s_events_say(executor: Any, figures: Any) -> None:
    """Back to back the stream is never empty, so the sum is the time between two events: within 2 %, and never much more.

    A host that stalls leaves the stream empty for a while, so that counts where it did not: in the best of several rounds.
    """
    from cuda.core import Device as CudaDevice
    from cuda.core import EventOptions

    given = inputs(executor)
    works = [executor.enqueue(given) for _ in range(8)]
    for each in works:
        each.wait()
    device, rounds = CudaDevice(), []
    for _ in range(ROUNDS):
        before = executor.device_time.ns
        first = executor.stream.record(device.create_event(EventOptions(timing_enabled=True)))
        began, waiting = time.monotonic_ns(), []
        for _ in range(WORKS // ROUNDS):
            waiting.append(executor.enqueue(given))
            if len(waiting) > 8:
                waiting.pop(0).wait()
        last = executor.stream.record(device.create_event(EventOptions(timing_enabled=True)))
        last.sync()
        elapsed = time.monotonic_ns() - began
        executor.device_time.fetch()
        measured, by_events = executor.device_time.ns - before, (last - first) * 1e6
        rounds.append({"timer_ns": measured, "events_ns": by_events, "host_ns": elapsed, "works": WORKS // ROUNDS})
    figures["accounts"] = rounds
    parts = [each["timer_ns"] / each["events_ns"] for each in rounds]
    assert max(parts) <= 1.005
    assert max(parts) >= 0.98


def test_reading_it_takes_no_call_of_the_driver(executor: Any) -> None:
    """The numbers are in host memory."""
    clock = executor.device_time
    assert bytes(view(clock._seen.ctypes.data, 8)) == clock._seen[:1].tobytes()
    assert min(timeit.repeat(lambda: clock.ns, repeat=10, number=100)) / 100 < 10e-6
