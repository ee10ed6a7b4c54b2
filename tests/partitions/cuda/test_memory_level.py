"""Whether loads are measured by what this process has, as NVML says, or by what the whole GPU has less."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from tests.simulation import Gpu, installed

MIB = 1 << 20
NOTE = "what models take is measured as what the whole GPU has less"
LISTS = "nvmlDeviceGetComputeRunningProcesses_v3"
OWN = os.getpid()
NOT_AVAILABLE = (1 << 64) - 1
NOT_LISTED = f"NVML lists no memory of this process ({OWN})"


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@contextmanager
def opened(gpu: Gpu) -> Iterator[Any]:
    with installed(gpu) as cuda, closing(cuda.open_cuda(Gpu.index)) as device:
        yield device


def test_it_is_this_process_s_where_nvml_counts_what_it_allocates(gpu: Gpu) -> None:
    gpu.others_have = 100 * MIB
    with opened(gpu) as device:
        assert device.driver_memory.own
        assert NOTE not in device.describe()
        assert not gpu.allocations_use, "what it was tried with is free again"


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        (lambda has: {OWN + 4000: has[OWN]}, NOT_LISTED),
        (lambda has: {}, NOT_LISTED),
        (lambda has: {OWN: 0}, f"NVML lists 0 bytes of this process ({OWN}), and 0 after it allocated 4194304"),
        (lambda has: {OWN: NOT_AVAILABLE}, NOT_LISTED),
        (lambda has: {OWN: 5, OWN + 4000: has[OWN]}, f"NVML lists 5 bytes of this process ({OWN}), and 5 after it"),
        (lambda has: dict.fromkeys(range(1, 2000), MIB) | has, NOT_LISTED),
    ],
    ids=["other number", "none", "0 bytes", "not available", "number of another process", "more than there can be"],
)
def test_it_is_the_whole_gpu_s_where_nvml_does_not_say_what_this_process_has(
    gpu: Gpu, listed: Callable[[dict[int, int]], dict[int, int]], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.listed = listed
    assert_whole(gpu, caplog, why)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("nvmlInit_v2", "GPU 0000:ff:1f.7: NVML cannot be asked: it answers 999"),
        ("nvmlDeviceGetHandleByPciBusId_v2", "GPU 0000:ff:1f.7: NVML cannot be asked: it answers 999"),
        (LISTS, NOT_LISTED),
        ("cuMemAlloc", "allocating 4194304 bytes to see whether NVML counts them: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
    ids=["nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", LISTS, "cuMemAlloc"],  # Not by the process's number.
)
def test_it_is_the_whole_gpu_s_where_a_call_fails(gpu: Gpu, call: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    gpu.fail(call)
    assert_whole(gpu, caplog, why)


def test_it_is_the_whole_gpu_s_without_nvml(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    gpu.has_nvml = False
    assert_whole(gpu, caplog, "GPU 0000:ff:1f.7: NVML cannot be asked: libnvidia-ml.so.1: cannot open shared object file")


def assert_whole(gpu: Gpu, caplog: pytest.LogCaptureFixture, why: str) -> None:
    caplog.set_level(logging.INFO, "greenlane.partitions")
    with opened(gpu) as device:
        assert not device.driver_memory.own
        assert NOTE in device.describe()
        assert not gpu.allocations_use
        assert device.energy() is None
    assert why in caplog.text


def test_it_says_the_energy_in_microjoules(gpu: Gpu) -> None:
    with opened(gpu) as device:
        assert device.energy() is None, "it has no meter"
        gpu.millijoules = 7
        assert device.energy() == 7000
