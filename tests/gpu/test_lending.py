"""Wide partitions and alternates on a real GPU: where they run, that they answer right, what they gain and what lenders pay.

The borrower has the first half of the granules, the lender the second, which it lends. Who decides when to launch wide is the
server; here the borrower always does, with one inference in flight.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic_ns, perf_counter
from typing import Any

import pytest

from benchmarks import subjects
from benchmarks.asks import tensor
from benchmarks.inside import quiet
from benchmarks.seat import Memory, Seat, all_at_once, at_rate, open_seat, placed, wait
from engines import Engine, load_engine
from engines.signature import align
from greenlane.load.figures import figures as summary
from partitions import Partition
from server.workers.gil_priority import GilPriorities

from .bench import MIB, assert_right, free_memory
from .networks import NETWORKS, plan
from .test_partitions import where_am_i

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
__all__ = ["where_am_i"]
GAIN = {("conv", 64): 1.5, ("resnet", 8): 1.1}
"""The least by which a wide partition of all SMs is faster than half of them, by model and rows; of SMs there are twice."""
LENDER_P99 = 1.8
"""The most by which the lender's p99 may grow beside a borrower that always runs wide. The server launches wide only while the
lender rests, and then aims at 1.15.
"""
ROUNDS, SECONDS, RATE = 5, 1.0, 250.0
Launch = Callable[[Any, int, Any, int], None]


class Shares:
    """A home partition, the lender's, and the wide one of both."""

    def __init__(self, device: Any, made: ExitStack) -> None:
        count = len(device.granules)
        halves = list(range(count // 2)), list(range(count // 2, count))
        self.device = device
        self.home, self.lender = (made.enter_context(closing(device.carve(half))) for half in halves)
        self.wide = made.enter_context(closing(device.carve(range(count), halves[1])))
        self.equal = made.enter_context(closing(device.carve(range(count))))
        """The same SMs as `wide` with a home partition's priority."""


@pytest.fixture(scope="module")
def shares(device: Any) -> Iterator[Shares]:
    with ExitStack() as made:
        yield Shares(device, made)


@pytest.fixture(scope="module")
def root(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lending")
    subjects.write(root, {"conv", "resnet"}, plans=True)
    return root


def load(device: Any, root: Path, model: str) -> Engine:
    return load_engine(next((root / model / "1").iterdir()), device)


def test_a_wide_partition_runs_on_all_granules(shares: Shares) -> None:
    home, lender, wide = (partition.locate() for partition in (shares.home, shares.lender, shares.wide))
    assert not home & lender
    assert wide == home | lender
    assert len(wide) == shares.wide.size == sum(shares.device.granules)


def test_streams_have_the_priorities_of_their_partitions(shares: Shares) -> None:
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    shares.device.make_current()
    lowest, highest = handle_return(driver.cuCtxGetStreamPriorityRange())
    assert highest < lowest
    found = []
    for partition in (shares.home, shares.lender, shares.wide):
        with closing(partition.make_stream()) as side:
            found.append([int(handle_return(driver.cuStreamGetPriority(handle))) for handle in (partition.handle, side.handle)])
    assert found == [[highest] * 2, [highest] * 2, [lowest] * 2]


@pytest.mark.parametrize("name", ["mlp", "resnet", "encoder"])
def test_alternates_answer_right_in_turns(name: str, shares: Shares, tmp_path: Path, figures: dict[str, Any]) -> None:
    network = NETWORKS[name]()
    with ExitStack() as made:
        engine = made.enter_context(closing(load_engine(plan(tmp_path, network), shares.device)))
        home = made.enter_context(closing(engine.bind(shares.home)))
        before = free_memory(shares.device)
        wide = made.enter_context(closing(home.alternate(shares.wide)))
        figures[f"lending: MiB of a wide {name}"] = (before - free_memory(shares.device)) / MIB
        narrow = made.enter_context(closing(home.alternate(shares.lender)))
        adds = wide.describe()["adds"]
        assert set(adds) <= {"graphs"}, "an alternate shares all but its graphs"
        figures[f"lending: MiB of the graphs of a wide {name}"] = adds.get("graphs", 0) / MIB
        for _ in range(3):
            for executor, partition in ((home, shares.home), (wide, shares.wide), (narrow, shares.lender)):
                assert_right(network, executor, partition, turns=2)
        with closing(home.rebind(shares.lender)) as moved:
            home.close()
            for executor, partition in ((moved, shares.lender), (wide, shares.wide), (moved, shares.lender)):
                assert_right(network, executor, partition, turns=1)


def seats(device: Any, engine: Engine, partitions: list[Partition], rows: int, model: str, made: ExitStack) -> list[Seat]:
    """The borrower's, of executors that take turns; the first of them is at home."""
    x = tensor(model, rows)
    nbytes = align(x.nbytes) + engine.signature.output_bytes(engine.signature.check([x.shape]))
    home = engine.bind(partitions[0])
    executors = [home, *[home.alternate(partition) for partition in partitions[1:]]]
    return [
        made.enter_context(closing(Seat(partition, executor, x, [Memory(device, nbytes)])))
        for partition, executor in zip(partitions, executors, strict=True)
    ]


def one_at_a_time(seat: Seat, start: float, until: float, priorities: GilPriorities) -> int:
    """Inferences back to back with one in flight; how many. Blocks."""
    done, took = 0, 0
    while perf_counter() < start:
        pass
    with placed(priorities, lambda: True) as place:
        while perf_counter() < until:
            place.yield_gil(began := monotonic_ns())
            wait(seat.enqueue(), place, took)
            done, took = done + 1, monotonic_ns() - began
    return done


def rate(seat: Seat, seconds: float = SECONDS) -> float:
    start, priorities = perf_counter() + 0.02, GilPriorities()
    run = partial(one_at_a_time, start=start, until=start + seconds, priorities=priorities)
    return all_at_once([(seat, run)])[0] / seconds


@pytest.mark.parametrize(("model", "rows"), GAIN)
def test_wide_is_faster_than_home(model: str, rows: int, shares: Shares, root: Path, figures: dict[str, Any]) -> None:
    with ExitStack() as made:
        engine = made.enter_context(closing(load(shares.device, root, model)))
        home, wide = seats(shares.device, engine, [shares.home, shares.wide], rows, model, made)
        made.enter_context(quiet())
        gains = [rate(wide) / rate(home) for _ in range(ROUNDS)]
    figures[f"lending: wide over home, {model} b{rows}"] = gains
    assert median(gains) >= GAIN[model, rows]


def test_an_alternate_that_is_not_used_costs_home_nothing(shares: Shares, root: Path, figures: dict[str, Any]) -> None:
    with ExitStack() as made:
        engine = made.enter_context(closing(load(shares.device, root, "resnet")))
        (alone,) = seats(shares.device, engine, [shares.home], 1, "resnet", made)
        home, _ = seats(shares.device, engine, [shares.home, shares.wide], 1, "resnet", made)
        made.enter_context(quiet())
        ratios = [rate(home) / rate(alone) for _ in range(ROUNDS)]
    figures["lending: home with an alternate over home without"] = ratios
    assert median(ratios) >= 0.97


def test_the_lender_s_p99_beside_one_wide_inference_at_a_time(shares: Shares, root: Path, figures: dict[str, Any]) -> None:
    def p99(borrower: Seat | None) -> float:
        priorities, start = GilPriorities(), perf_counter() + 0.05
        tasks: list[tuple[Seat, Callable[[Seat], Any]]]
        tasks = [(lender, partial(at_rate, rate=RATE, start=start, seconds=SECONDS, priorities=priorities))]
        if borrower:
            run = partial(one_at_a_time, start=start - 0.04, until=start + SECONDS, priorities=priorities)
            tasks.append((borrower, run))
        return summary(all_at_once(tasks)[0]).p99

    partitions: list[Partition] = [shares.home, shares.wide, shares.equal]
    with ExitStack() as made:
        engine = made.enter_context(closing(load(shares.device, root, "resnet")))
        lender = made.enter_context(closing(open_seat(shares.device, engine, shares.lender, tensor("resnet", 1))))
        home, wide, equal = seats(shares.device, engine, partitions, 8, "resnet", made)
        made.enter_context(quiet())
        rounds = [[p99(borrower) for borrower in (None, home, wide, equal)] for _ in range(ROUNDS)]
    ratios = [median(each[place] / each[0] for each in rounds) for place in (1, 2, 3)]
    figures["lending: lender's p99 over alone, beside home, wide, and wide of its own priority"] = ratios
    assert ratios[1] <= LENDER_P99


def test_the_lender_s_blocks_start_before_those_of_a_wide_partition(
    shares: Shares, where_am_i: Launch, figures: dict[str, Any]
) -> None:
    """A kernel of 40 waves of blocks is on all SMs. The lender's, of one wave, waits for blocks that run, not for waves."""
    nanoseconds, waves = 50_000, 40
    with ExitStack() as made:
        memory = (ctypes.c_int64 * (3 * 2 * waves * sum(shares.device.granules)))()
        pinned = made.enter_context(closing(shares.device.pin(ctypes.addressof(memory), ctypes.sizeof(memory))))

        def lender_took(crowd: Any) -> float:
            def run() -> float:
                if crowd is not None:
                    where_am_i(crowd.stream, 2 * waves * crowd.size, pinned, nanoseconds)
                began = perf_counter()
                where_am_i(shares.lender.stream, 2 * shares.lender.size, pinned, nanoseconds)
                shares.lender.stream.sync()
                took = perf_counter() - began
                for partition in (shares.wide, shares.equal):
                    partition.stream.sync()
                return took * 1e6

            return median(shares.lender.run(run) for _ in range(9))

        lender_took(None)
        alone, beside_wide, beside_equal = (lender_took(crowd) for crowd in (None, shares.wide, shares.equal))
    figures["lending: us of one wave of the lender's, alone, behind a wide kernel, behind one of its own priority"] = [
        alone,
        beside_wide,
        beside_equal,
    ]
    assert beside_wide <= waves / 4 * alone
    assert beside_wide <= 1.1 * beside_equal
