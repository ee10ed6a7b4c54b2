"""Processes are started with copies of descriptors, whatever becomes of these meanwhile."""

import os
from collections.abc import Mapping

from server.processes.children import spawn


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
