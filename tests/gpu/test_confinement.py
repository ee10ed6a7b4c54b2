"""Do an engine's own kernels keep to their partition's SMs? Found out from the outside, for an engine says nothing of it.

What it proves:

- *Located.* A witness on every SM of the GPU measures again and again how long a piece of arithmetic takes, in the SM's cycles.
  That is constant but for what else runs on the same SM. While an engine runs on partition A, only witnesses on A's SMs are
  slowed, whichever of its kernels, copies and graphs is running: none of them was on another SM for as long as a piece takes,
  some microseconds, more often than noise. The same engine on a plain stream slows witnesses everywhere: the measure sees it.
- *Needs nothing outside.* With every thread of all SMs outside of A taken, an engine on A is as fast as without; on a plain
  stream it is slower.
- *Has nothing inside.* With every thread of A's SMs taken, an engine on A does not end, and one on B does, again and again.

What it does not prove: that DRAM, L2 or PCIe are not shared. They are (tests/gpu/test_isolation.py has bounds for that).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from engines import load_engine
from partitions import Device
from server.precedence import Precedence
from tests.load import subjects
from tests.load.asks import TOLERANCE, tensor
from tests.load.plain import open_plain
from tests.load.seat import Seat, all_at_once, back_to_back, open_seat
from tests.load.subjects import SUBJECTS

from .witness import Felt, Kernels

pytestmark = pytest.mark.gpu
ROWS = {"conv": 64, "resnet": 8, "mlp": 1, "image": 16}
"""Batches of the engines: one that fills every SM, one of many kernels, one of short ones, one that is copies above all."""
FILLS = {"conv": 0.9, "resnet": 0.9, "mlp": 0.01, "image": 0.01}
"""The least part of the partition's SMs on which each has to be found: small kernels have fewer blocks than there are SMs."""
WATCHED_MS = 400
ON_B = 200
"""Inferences on B while nothing on A can begin."""


class Bench:
    """Two partitions that are all of the GPU, seats on them and on a plain stream, and the kernels that find out."""

    def __init__(self, device: Device, root: Path, left: ExitStack) -> None:
        count = len(device.granules)
        self.a = left.enter_context(closing(device.carve(range(count // 2))))
        self.b = left.enter_context(closing(device.carve(range(count // 2, count))))
        self.plain = left.enter_context(closing(open_plain(device)))
        self.kernels = Kernels(device)
        self.sms_a, self.sms_b = self.a.locate(), self.b.locate()
        self._device = device
        self._root = root
        self._left = left
        self._seats: dict[tuple[str, int], Seat] = {}

    def seat(self, model: str, partition: Any) -> Seat:
        """Bound when it is first asked for, which blocks and needs SMs that are free."""
        key = (model, id(partition))
        if key not in self._seats:
            engine = self._left.enter_context(closing(load_engine(next((self._root / model / "1").iterdir()), self._device)))
            made = open_seat(self._device, engine, partition, tensor(model, ROWS[model]))
            self._seats[key] = self._left.enter_context(closing(made))
        return self._seats[key]

    def witnessed(self, seat: Seat | None) -> dict[int, Felt]:
        """What the witness on every SM felt while this seat ran back to back, or nothing did. Blocks.

        Fails if no inference ended meanwhile: then the engine's kernels find no room beside a witness, and prove nothing.
        """
        with self.kernels.witnesses([self.a, self.b], WATCHED_MS) as found:
            if seat:
                until = perf_counter() + WATCHED_MS / 2e3
                (done,) = all_at_once([(seat, partial(back_to_back, start=0.0, until=until, precedence=Precedence()))])
                assert done, "no inference ended beside the witnesses: has it kernels that take a whole SM?"
        return found


def shared(found: dict[int, Felt]) -> frozenset[int]:
    """The SMs on which something else ran."""
    return frozenset(sm for sm, felt in found.items() if felt.shared)


def milliseconds(seat: Seat, turns: int = 40) -> float:
    """The median time of an inference alone. Blocks."""

    def run() -> list[float]:
        times = []
        for _ in range(turns):
            began = perf_counter()
            seat.enqueue().wait()
            times.append((perf_counter() - began) * 1e3)
        return times

    return median(seat.on_thread(run))


def assert_right(seat: Seat, model: str) -> None:
    wanted = subjects.expected(SUBJECTS[model].network(), tensor(model, ROWS[model]))
    assert np.abs(seat.answer() - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.fixture(scope="module")
def bench(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("confinement")
    subjects.write(root, set(ROWS), plans=True)
    with ExitStack() as left:
        yield Bench(device, root, left)


def test_witnesses_are_on_every_sm_and_feel_nothing_where_nothing_runs(bench: Bench) -> None:
    found = bench.witnessed(None)

    assert frozenset(found) == bench.sms_a | bench.sms_b
    assert len(found) == sum(bench._device.granules)
    assert not shared(found), {sm: found[sm] for sm in shared(found)}


@pytest.mark.parametrize("model", ROWS)
def test_an_engine_s_own_kernels_run_on_its_partition_s_sms_and_on_no_others(
    model: str, bench: Bench, figures: dict[str, Any]
) -> None:
    seat = bench.seat(model, bench.a)
    bench.witnessed(seat)  # So that nothing is compiled or captured in the one that counts.

    found = shared(bench.witnessed(seat))

    figures[f"SMs on which {model}'s kernels were seen, of {len(bench.sms_a)}"] = len(found & bench.sms_a)
    assert not found - bench.sms_a
    assert len(found) >= FILLS[model] * len(bench.sms_a)
    assert_right(seat, model)


def test_the_same_engine_on_a_plain_stream_is_seen_on_sms_of_both(bench: Bench) -> None:
    """The control: a kernel that leaves its partition would be seen."""
    found = shared(bench.witnessed(bench.seat("conv", bench.plain)))

    assert found & bench.sms_a
    assert found & bench.sms_b


def test_an_engine_is_as_fast_with_every_sm_outside_of_its_partition_taken(bench: Bench, figures: dict[str, Any]) -> None:
    own, plain = bench.seat("conv", bench.a), bench.seat("conv", bench.plain)
    free = milliseconds(own), milliseconds(plain)

    with bench.kernels.held(bench.b) as held:
        taken = milliseconds(own), milliseconds(plain)
        assert not held.gave_up
        assert held.sms == bench.sms_b

    figures["conv on A and on a plain stream, ms: B free, B taken"] = [free, taken]
    assert taken[0] <= 1.1 * free[0]
    assert taken[1] >= 1.3 * free[1], "the control: a plain stream would have used the SMs that were taken"
    assert_right(own, "conv")


@pytest.mark.parametrize("model", ROWS)
def test_an_engine_does_nothing_while_its_partition_s_sms_are_taken_and_its_neighbour_goes_on(model: str, bench: Bench) -> None:
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
