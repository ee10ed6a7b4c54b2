"""Whether an engine's own kernels stay on their partition's SMs. Tested from outside, as an engine does not report it.

With every thread of partition A's SMs taken, an engine on A does not end: none of its kernels, copies and graphs ran anywhere
else. An engine on B does end meanwhile, again and again. What this does not prove: that DRAM, L2 or PCIe are not shared. They
are (tests/gpu/test_isolation.py has bounds for that).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from benchmarks import subjects
from benchmarks.asks import TOLERANCE, tensor
from benchmarks.seat import Seat, all_at_once, open_seat
from benchmarks.subjects import SUBJECTS
from engines import load_engine
from partitions import Device

from .holding import Kernels

pytestmark = pytest.mark.gpu
ROWS = {"conv": 64, "resnet": 8, "mlp": 1, "image": 16}
"""Batches of the engines: one that fills every SM, one of many kernels, one of short ones, one that is copies above all."""
ON_B = 200
"""Inferences on B while nothing on A can begin."""


class Bench:
    """Two partitions that are all of the GPU, seats on them, and the kernel that takes a partition's SMs."""

    def __init__(self, device: Device, root: Path, left: ExitStack) -> None:
        count = len(device.granules)
        self.a = left.enter_context(closing(device.carve(range(count // 2))))
        self.b = left.enter_context(closing(device.carve(range(count // 2, count))))
        self.kernels = Kernels(device)
        self.sms_a, self.sms_b = self.a.locate(), self.b.locate()
        self._device = device
        self._root = root
        self._left = left
        self._seats: dict[tuple[str, int], Seat] = {}

    def seat(self, model: str, partition: Any) -> Seat:
        """Binds the engine at the first call, which blocks and needs free SMs."""
        key = (model, id(partition))
        if key not in self._seats:
            engine = self._left.enter_context(closing(load_engine(next((self._root / model / "1").iterdir()), self._device)))
            made = open_seat(self._device, engine, partition, tensor(model, ROWS[model]))
            self._seats[key] = self._left.enter_context(closing(made))
        return self._seats[key]


def assert_right(seat: Seat, model: str) -> None:
    wanted = subjects.expected(SUBJECTS[model].network(), tensor(model, ROWS[model]))
    assert np.abs(seat.answer() - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.fixture(scope="module")
def bench(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("confinement")
    subjects.write(root, set(ROWS), plans=True)
    with ExitStack() as left:
        yield Bench(device, root, left)


@pytest.mark.parametrize("model", ROWS)
def test_an_engine_runs_only_on_its_partitions_sms(model: str, bench: Bench) -> None:
    seat, neighbour = bench.seat(model, bench.a), bench.seat("mlp", bench.b)
    run_once: Callable[[Seat], Any] = lambda each: each.enqueue().wait()  # noqa: E731  # A task for a seat's thread.

    with bench.kernels.held(bench.a) as held:
        assert held.sms == bench.sms_a
        waiting = Thread(target=lambda: all_at_once([(seat, run_once)]))
        waiting.start()
        all_at_once([(neighbour, lambda each: [run_once(each) for _ in range(ON_B)])])
        stood_still = waiting.is_alive()
        gave_up = held.gave_up
        held.release()
        waiting.join()

    assert stood_still
    assert not gave_up
    assert_right(seat, model)
    assert_right(neighbour, "mlp")
