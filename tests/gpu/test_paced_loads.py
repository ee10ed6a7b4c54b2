"""What others do in the same process while the kernels of a network are loaded with pauses, on a real GPU.

The load holds locks of the library for as long as it takes, pauses included. So whatever else calls the library has to end the
pauses, or not to need those locks. `pytest -q -s tests/gpu/test_paced_loads.py` prints the figures.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nets import MOST_ROWS, NETS, write_all
from benchmarks.seat import Seat, open_seat
from engines import Builds, CacheFolder, Engine, RuntimeSettings, load_engine
from partitions import Device, Partition, open_device
from partitions.cuda.kernel_loads import KERNEL_LOADS

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
SETTINGS = RuntimeSettings(copies="auto", warm_up="usual")
PATIENCE = 120.0
PACED = 1.0
"""Seconds of pauses after which the load is in the middle of its kernels."""
ASKS = 100


class Site:
    """A device, a folder of models with a cache, and a thread that loads."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        write_all(folder, "cuda")
        self._folder, self._stack = folder, stack
        self._builds = Builds(CacheFolder([folder / "cache"]), compiles=True)
        stack.callback(self._builds.close)
        self.device: Device = stack.enter_context(closing(open_device("cuda")))
        self._loader = stack.enter_context(ThreadPoolExecutor(1, "load"))

    def load(self, name: str, **changes: Any) -> Engine:
        path, settings = self._folder / name / "1" / "model.onnx", replace(SETTINGS, **changes)
        return self._stack.enter_context(closing(load_engine(path, self.device, settings, MOST_ROWS, self._builds)))

    def seat(self, engine: Engine, partition: Partition) -> Seat:
        return self._stack.enter_context(closing(open_seat(self.device, engine, partition, NETS["cuda"]["tiny"].draw(1, 1))))

    def carve(self, *granules: int) -> Partition:
        return self._stack.enter_context(closing(self.device.carve(granules)))

    def load_in_the_background(self, engine: Engine, partition: Partition) -> "Future[float]":
        """Bind it with pauses; the result is how many seconds that took. Returns in the middle of it."""

        def bind() -> float:
            began = time.monotonic()
            with KERNEL_LOADS.background():
                self._stack.enter_context(closing(engine.bind(partition)))
            return time.monotonic() - began

        before, loading, ends = KERNEL_LOADS.waited(), self._loader.submit(bind), time.monotonic() + PATIENCE
        while KERNEL_LOADS.waited() < before + PACED:
            assert not loading.done(), loading.result()
            assert time.monotonic() < ends
            time.sleep(0.01)
        return loading


@pytest.fixture(scope="module")
def site(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        KERNEL_LOADS.open()
        stack.callback(KERNEL_LOADS.hurry)
        yield Site(tmp_path_factory.mktemp("loads"), stack)


def took(function: Callable[[], Any]) -> float:
    began = time.monotonic()
    function()
    return time.monotonic() - began


def test_what_calls_the_library_does_not_wait_for_the_pauses_of_a_load(site: Site) -> None:
    tiny = site.load("tiny")
    graphs, calls = site.seat(tiny, site.carve(0)), site.seat(site.load("tiny", graphs="off"), site.carve(1))
    mob, free = site.load("mob"), site.carve(6)

    def longest(seat: Seat) -> float:
        return max(seat.on_thread(lambda: [took(lambda: seat.enqueue().wait()) for _ in range(ASKS)]))

    def move() -> None:
        graphs.executor.rebind(free).close()

    steps: dict[str, tuple[Callable[[], float], float]] = {
        "inferences that are graphs, the longest": (lambda: longest(graphs), 0.05),
        "inferences that are not, the longest": (lambda: longest(calls), 0.2),
        "an executor moves": (lambda: took(move), 1.0),
        "a plan is read": (lambda: took(lambda: site.load("tiny", copies="engine")), 1.0),
    }
    for step, _ in steps.values():  # What is done for the first time takes longer.
        step()
    loading, found = site.load_in_the_background(mob, site.carve(2, 3, 4, 5)), {}
    for name, (step, _) in steps.items():
        found[name] = step()
        print(f"{name}: {found[name] * 1e3:.1f} ms{'' if not loading.done() else ', after the load'}")
    print(f"the load took {loading.result(PATIENCE):.1f} s")
    assert {name: value for name, value in found.items() if value > steps[name][1]} == {}
