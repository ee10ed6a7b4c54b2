"""What a GPU moves, by NVML's GPM on a simulated GPU."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.simulation import Gpu, installed

TB = 10**12
PEAK = 3_352_320_000_000
"""Bytes a second of an H100, of the SXM kind."""


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def nvml(gpu: Gpu) -> Iterator[Any]:
    with installed(gpu) as cuda:
        yield cuda.open_nvml("0000:4e:00.0")


def test_bytes_are_counted_from_the_rates_between_readings(gpu: Gpu, nvml: Any) -> None:
    traffic = nvml.traffic(lambda: gpu.seconds)
    assert traffic.bandwidth == nvml.bandwidth() == PEAK
    assert traffic.read() == {}, "nothing was read yet"
    gpu.seconds, gpu.moved = 2.0, (3e12, 2e9, 1e9)
    assert traffic.read() == {"memory": 3 * TB, "pcie_in": 2 * 10**9, "pcie_out": 10**9}
    gpu.seconds, gpu.moved = 4.5, (4e12, 2e9, 5e9)
    assert traffic.read() == {"memory": 4 * TB, "pcie_in": 2 * 10**9, "pcie_out": 5 * 10**9}


@pytest.mark.parametrize("call", ["nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_what_could_not_be_read_is_in_the_next_reading(gpu: Gpu, nvml: Any, call: str) -> None:
    traffic = nvml.traffic(lambda: gpu.seconds)
    gpu.seconds, gpu.moved = 2.0, (1e12, 0.0, 0.0)
    gpu.fail(call)
    assert traffic.read() == {}
    gpu.seconds, gpu.moved = 4.0, (3e12, 0.0, 0.0)
    assert traffic.read() == {"memory": 3 * TB, "pcie_in": 0, "pcie_out": 0}


@pytest.mark.parametrize("bad", [(1e40, 0.0, 0.0), (2e12, 0.0, 1e306), (2e12, 3e14, 0.0)])
def test_more_than_any_gpu_can_move_is_left_out(gpu: Gpu, nvml: Any, bad: tuple[float, float, float]) -> None:
    traffic = nvml.traffic(lambda: gpu.seconds)
    for seconds, moved in ((2.0, (1e12, 0.0, 0.0)), (4.0, bad), (6.0, (3e12, 0.0, 0.0)), (8.0, (4e12, 0.0, 0.0))):
        gpu.seconds, gpu.moved = seconds, moved
        counted = traffic.read()
    assert counted["memory"] in (2 * TB, 3 * TB), "a counter that falls counts as 0"
    assert (counted["pcie_in"], counted["pcie_out"]) == (0, 0)


def test_it_does_not_ask_before_there_can_be_an_answer(gpu: Gpu, nvml: Any) -> None:
    traffic = nvml.traffic(lambda: gpu.seconds)
    gpu.seconds, gpu.moved = 0.05, (1e12, 0.0, 0.0)
    assert traffic.read() == {}
    gpu.seconds = 0.5
    assert traffic.read()["memory"] == TB


def test_a_clock_other_than_the_drivers_loses_nothing(gpu: Gpu, nvml: Any) -> None:
    """NVML's values are as of up to 100 ms ago, when it renewed them; a steady rate is counted right all the same."""
    ours = 0.0
    traffic = nvml.traffic(lambda: ours)
    for second in range(1, 6):
        gpu.seconds = second + 0.1 * (second % 2)
        gpu.moved, ours = (gpu.seconds * 1e12, 0.0, 0.0), float(second)
        traffic.read()
    assert traffic.read()["memory"] == pytest.approx(5 * TB)


@pytest.mark.parametrize(
    "call",
    ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlDeviceGetMaxClockInfo"],
)
def test_there_is_none_where_a_call_fails(gpu: Gpu, nvml: Any, call: str) -> None:
    gpu.fail(call)
    assert nvml.traffic() is None


def test_there_is_none_where_the_gpu_does_not_count(gpu: Gpu, nvml: Any) -> None:
    gpu.moved = None
    assert nvml.traffic() is None


def test_what_a_gpu_moves_at_most_is_by_its_clocks_and_buses(gpu: Gpu) -> None:
    with installed(gpu) as cuda, closing(cuda.open_cuda(Gpu.index)) as device:
        moves = device.bandwidth()
        assert moves == (PEAK, 64 * 1980 * 10**6, 16 * 3_938_461_538)
        gpu.fail("nvmlDeviceGetMaxPcieLinkWidth")
        assert device.bandwidth() == (PEAK, 64 * 1980 * 10**6, 0), "its link is not known"
        gpu.fail("nvmlDeviceGetMaxClockInfo")
        assert device.bandwidth() is None


def test_without_nvml_nothing_is_known_of_what_a_gpu_moves(gpu: Gpu) -> None:
    gpu.has_nvml = False
    with installed(gpu) as cuda, closing(cuda.open_cuda(Gpu.index)) as device:
        assert device.bandwidth() is None
