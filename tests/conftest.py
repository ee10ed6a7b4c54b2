"""What every test may rely on: the CPU as a device, one partition of it, and no deadline for generated examples."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from partitions.cpu import CpuDevice, CpuPartition, open_cpu

from .workers import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

pytest.register_assert_rewrite("tests.contract")

settings.register_profile("unhurried", deadline=None)  # A busy machine is no reason to fail.
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """A server in the process of the tests may have been asked for other levels; the next test expects those of before."""
    loggers = [logging.getLogger(name) for name in ("greenlane", "uvicorn")]
    before = [(logger, logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    yield
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        logger.handlers = handlers
        logger.propagate = propagate


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
