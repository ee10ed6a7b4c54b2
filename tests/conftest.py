"""What every test may rely on: the CPU as a device, one partition of it, and no deadline for generated examples."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from partitions.cpu import CpuDevice, CpuPartition, open_cpu

pytest.register_assert_rewrite("tests.contract")

settings.register_profile("unhurried", deadline=None)  # A busy machine is no reason to fail.
settings.load_profile("unhurried")


@pytest.fixture
def device() -> CpuDevice:
    """Every core this process may use."""
    return open_cpu()


@pytest.fixture
def partition(device: CpuDevice) -> Iterator[CpuPartition]:
    """The first core."""
    partition = device.carve([0])
    yield partition
    partition.close()
