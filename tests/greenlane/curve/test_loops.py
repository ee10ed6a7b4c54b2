"""The loops on a clock of their own: a request's latency is what a queue in order makes of it."""

from collections.abc import Sequence
from ctypes import c_void_p
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenlane.curve import measure
from greenlane.curve.measure import Effort, arrivals, measure_at, mixed, requests_at
from greenlane.curve.options import Target
from partitions.cuda.nvml import Nvml
from tests.simulation import Gpu
from tests.simulation.nvml import Library

TICK = 1e-7
"""Seconds that pass with each look at the clock, so that a loop that only looks ends."""


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += TICK
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Stream:
    """Works that take so many seconds each, one after another, whether or not anything waits for them."""

    def __init__(self, clock: Clock, seconds: Sequence[float]) -> None:
        self.clock = clock
        self.seconds = list(seconds)
        self.free_at = 0.0
        self.in_flight = self.most = 0

    def enqueue(self) -> "Stream.Work":
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        self.free_at = max(self.free_at, self.clock.now) + self.seconds.pop(0)
        return Stream.Work(self, self.free_at)

    class Work:
        def __init__(self, stream: "Stream", ends: float) -> None:
            self.stream = stream
            self.ends = ends

        def wait(self) -> tuple[()]:
            self.stream.clock.now = max(self.stream.clock.now, self.ends)
            self.stream.in_flight -= 1
            return ()

        def cancel(self) -> None:
            """Never asked for."""


def queued(dues: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """The latency of each request of a queue in order (Lindley's recursion)."""
    found, free_at = [], 0.0
    for due, takes in zip(dues, seconds, strict=True):
        free_at = max(free_at, due) + takes
        found.append(free_at - due)
    return found


@given(
    st.lists(st.tuples(st.floats(1e-4, 0.02), st.floats(1e-4, 0.02)), min_size=1, max_size=60),
    st.sampled_from([1, 2]),
)
def test_latency_counts_from_when_a_request_is_due_with_its_queue(gaps: list[tuple[float, float]], depth: int) -> None:
    due, seconds = list(accumulate(gap for gap, _ in gaps)), [takes for _, takes in gaps]
    with pytest.MonkeyPatch.context() as patched:
        clock = Clock()
        patched.setattr(measure, "time", clock)
        stream = Stream(clock, seconds)
        ended, found = measure.when_due(stream.enqueue, depth, due, 1e9, 1000, 1e9)
    assert ended is None
    assert found == pytest.approx(queued(due, seconds), abs=0.002)  # Each look takes TICK.
    assert stream.most <= depth


def test_an_open_loop_ends_once_too_many_were_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    due = arrivals(100.0, 1000, 0)
    ended, found = measure.when_due(Stream(clock, [0.006] * 2000).enqueue, 1, due, 0.005, 20, 10.0)
    assert ended == "misses"
    assert len(found) == 21
    ended, found = measure.when_due(Stream(clock, [0.02] * 2000).enqueue, 1, due, 1e9, 20, 0.5)
    assert ended == "overloaded"
    assert found[-1] > 0.5
    assert len(found) < 200


def test_one_group_of_slow_requests_is_too_noisy_to_say_and_many_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the p99 allows were slow, but all of them in one stall: other seconds may have none."""
    target, effort, throughput = Target(100.0, 0.005), Effort(25.0), 1000.0
    most = requests_at(target.rate, effort.seconds)
    stall = [0.001] * 900 + [0.006] * 60 + [0.001] * most
    often = ([0.001] * 19 + [0.006]) * most
    for seconds, word in ((stall, "too noisy"), (often, "misses")):
        clock = Clock()
        monkeypatch.setattr(measure, "time", clock)
        found = measure_at(Stream(clock, seconds).enqueue, 1, throughput, target, effort)
        assert found.word == word
        assert found.p99
        assert found.p99.requests < most
        assert (found.p99.low <= 0.005 < found.p99.high) == (word == "too noisy")


def test_back_to_back_counts_what_ends_and_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    stream = Stream(clock, [0.002] * 2000)
    assert measure.back_to_back(stream.enqueue, 2, 1.0, 20) == pytest.approx(500, rel=0.01)
    assert stream.in_flight == 0
    assert stream.most == 2
    assert measure.alone(stream.enqueue, 0.1, 20) == pytest.approx([0.002] * 50, rel=0.01)


@pytest.mark.parametrize("takes", [0.0005, 0.03])
def test_what_requests_drew_is_right_though_counters_are_old(takes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML renews its values each 100 ms, and the GPU was idle before."""
    clock, gpu, history = Clock(), Gpu(), [(0.0, 0)]
    clock.now = 5.09
    monkeypatch.setattr(measure, "time", clock)
    stream = Stream(clock, [takes] * 10_000)

    def enqueue() -> Stream.Work:
        work = stream.enqueue()
        history.append((work.ends, history[-1][1] + 1))
        return work

    def sampled() -> None:
        gpu.meanwhile("nvmlGpmSampleGet", sampled)
        gpu.seconds = int(clock.now * 10) / 10
        ended = max(count for ends, count in history if ends <= gpu.seconds)
        gpu.moved = ended * 4e8, ended * 1e6, ended * 2e6

    sampled()
    throughput, drawn = measure.counted(enqueue, 2, 0.1, Nvml(Library(gpu), c_void_p()))  # type: ignore[arg-type]
    assert drawn
    assert throughput == pytest.approx(1 / takes, rel=0.01)
    assert drawn.moved == pytest.approx((4e8, 1e6, 2e6), rel=0.06 if takes > 0.001 else 0.02)
    assert drawn.rates == pytest.approx([throughput * each for each in drawn.moved], rel=0.001)
    assert drawn.memory == pytest.approx(drawn.rates.memory / (2619e6 * 2 * 5120 / 8))
    assert drawn.pcie == pytest.approx(drawn.rates.pcie_out / (16 * 3_938_461_538)), "the way that is used more"
    assert stream.in_flight == 0


def test_the_same_seed_chooses_the_same_models() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def enqueue(self) -> str:
            return self.name

    def chosen(seed: int) -> list[str]:
        enqueue = mixed([Named("a"), Named("b")], [3.0, 1.0], seed)  # type: ignore[list-item]
        return [str(enqueue()) for _ in range(400)]

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
    assert 0.65 < chosen(1).count("a") / 400 < 0.85


def test_arrivals_are_as_many_as_asked_for_at_the_rate_and_the_same_for_the_same_seed() -> None:
    assert arrivals(100.0, 5, 3) == arrivals(100.0, 5, 3) != arrivals(100.0, 5, 4)
    assert arrivals(100.0, 10_000, 0)[-1] == pytest.approx(100.0, rel=0.05)
    assert arrivals(1.0, 0, 0) == []
