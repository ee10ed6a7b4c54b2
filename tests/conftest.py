"""What every test may rely on: the CPU as a device, a partition of it, a builder, no deadline for generated examples."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import settings

from engines.errors import ModelRefused
from engines.tensorrt.api import TensorRT, find_tensorrt
from partitions.c_library import compile_library
from partitions.cpu import CpuDevice, CpuPartition, open_cpu
from server.launch_loop.library import SOURCES

from . import forked
from .workers import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

pytest.register_assert_rewrite("tests.contract")

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    # In the background of a shell and under nohup these are ignored, and so they would be in all programs that tests start
    # and send them to. A program gets the default action of what its parent has a handler for.
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

settings.register_profile("unhurried", deadline=None)  # A busy machine is no reason to fail.
settings.load_profile("unhurried")


def pytest_configure() -> None:
    """Compile the launch loop of these sources, unless that was done: after a change of them workers would serve without it."""
    with suppress(RuntimeError):  # There is no compiler, or the tests of the loop say what is wrong.
        compile_library(SOURCES)


def pytest_sessionfinish() -> None:
    forked.close()


def pytest_collectstart() -> None:
    """While tests are collected, hardly anything is garbage; looking for that takes a quarter of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude from garbage collection the tests and what they import: half a million objects, which stay until the end."""
    gc.freeze()
    gc.enable()
    # What servers in this process freeze, for the life of a process of theirs, is to be collected when they have ended.
    gc.freeze = lambda: None


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """A command may set what the processes that it starts are to have; those of the next test have what there was before."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: text for name, text in before.items() if os.environ.get(name) != text})


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


@pytest.fixture(scope="module")
def forked_programs() -> Iterator[None]:
    """Programs in Python that are started meanwhile are forked from a process that has imported the server."""
    with forked.instead():
        yield


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


@pytest.fixture(scope="session")
def rtx() -> TensorRT:
    """TensorRT-RTX, which builds without a GPU, where it is installed."""
    try:
        return find_tensorrt(["tensorrt_rtx"])
    except ModelRefused as refusal:
        pytest.skip(str(refusal))
