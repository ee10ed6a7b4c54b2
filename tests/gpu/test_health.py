"""What a GPU says of its state, read by the process that a server starts for it, and how long a reading takes."""

import subprocess
from time import perf_counter
from typing import Any

import pytest

from partitions.cuda.nvml import open_nvml
from partitions.health import command, from_line

pytestmark = pytest.mark.gpu


def test_readings_of_a_gpu_come_every_two_seconds(device: Any) -> None:
    system = pytest.importorskip("cuda.core.system")
    pipe = subprocess.PIPE
    with subprocess.Popen(command([device.address]), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin
        assert process.stdout
        address, first = from_line(process.stdout.readline())
        began = perf_counter()
        _, second = from_line(process.stdout.readline())
        apart = perf_counter() - began
        process.stdin.close()
        assert process.wait(10) == 0
    print(first)
    assert address == device.address
    assert 1.0 < apart < 4.0
    nvml = open_nvml(device.address)
    if nvml and nvml.traffic():
        assert set(second.moved) == {"memory", "pcie_in", "pcie_out"}
        assert second.memory_bandwidth == nvml.bandwidth()
    if first.energy is not None:
        assert second.energy
        assert second.energy >= first.energy
    if not system.CUDA_BINDINGS_NVML_IS_COMPATIBLE:
        assert "cuda-bindings 13.2 or newer" in first.missing
        return
    assert first.missing == ""
    assert first.memory_total
    assert first.memory_used
    assert 0 < first.memory_used < first.memory_total
    assert first.utilization is not None
    assert 0 <= first.utilization <= 1
    assert (first.uuid[:4], first.lost, first.uuid) == ("GPU-", False, second.uuid)
    assert 1e8 < first.clocks["sm"] < 1e10
