"""Processes are started with copies of descriptors, whatever becomes of these meanwhile, and end also without a forkserver."""

import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

import pytest

from server.host import forkserver
from server.processes.children import spawn
from server.processes.children.heartbeat import observe


def write_to(descriptors: Mapping[str, int]) -> None:
    os.write(descriptors["pipe"], b"from the process")


async def test_a_descriptor_may_be_closed_and_its_number_be_anothers_before_the_process_starts() -> None:
    read, write = os.pipe()
    inherited = spawn.inherited_all({"pipe": write})
    other = os.memfd_create("of another tenant")
    os.dup2(other, write)
    process = await spawn.start(write_to, inherited)
    del inherited
    spawn.join(process, 30)
    assert (process.exitcode, os.fstat(other).st_size) == (0, 0)
    assert (os.read(read, 100), os.read(read, 100)) == (b"from the process", b""), "no end of it is left open here"
    for each in (read, write, other):
        os.close(each)


def stay(stopped: bool) -> None:
    if stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()


@pytest.fixture
async def another_forkserver() -> AsyncIterator[None]:
    """For the next test: the first start after its end may fail."""
    yield
    with suppress(EOFError):
        spawn.kill(await spawn.start(stay, False))


@pytest.mark.usefixtures("another_forkserver")
@pytest.mark.parametrize("stopped", [False, True])
async def test_a_process_has_ended_when_it_was_waited_for_though_its_forkserver_had_before(stopped: bool) -> None:
    """Another one would be started beside it, and both would have the tenant's memory."""
    process = await spawn.start(stay, stopped)
    forkserver.kill()
    process.join()
    assert process.pid
    assert process.exitcode == 255
    assert observe(process.pid).state not in "XZ"
    spawn.join(process, 0.1)
    assert observe(process.pid).state in "XZ"
