"""A process with the GPU that it sees as device 0, for tests of MPS.

A line of JSON says whether it is a client of an MPS server, or the error. Then it does what lines on its standard input ask
for, and answers each with a line. What "hold" took it has until the next line: a client that is killed in work is a fault of
all. "measured" says what it took since "measure".
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from partitions import open_device
from partitions.cuda.driver_memory import Taken
from partitions.mps import is_mps_client

from .holding import Kernels

SOURCE = r"""
extern "C" __global__ void bad(long long at) { *(volatile int *)at = 1; }
extern "C" __global__ void spin(long long nanoseconds) {
    long long began, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - began < nanoseconds);
}
"""
NOWHERE, LONG = 16, 10_000_000_000
MINUTE = 60_000_000_000
TAKES = 64 << 20
"""Bytes, of the device's memory."""


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    device: Any = open_device("cuda")
    partition = device.carve([0])
    partition.attach()
    say(client=is_mps_client(0), process=os.getpid())
    work: dict[str, Callable[[], object]] = {
        "work": partition.locate,
        "fault": lambda: (launch(device, partition, "bad", NOWHERE), partition.stream.sync()),
        "busy": lambda: launch(device, partition, "spin", LONG),
        "wait": partition.stream.sync,
        "hold": lambda: held.enter_context(Kernels(device).held(partition, MINUTE)),
        "take": lambda: memory.append(allocated(TAKES)),
        "give": lambda: free(memory.pop()),
        "measure": lambda: measuring.enter_context(taken.measuring(0)),
    }
    held, measuring, taken = ExitStack(), ExitStack(), Taken(device.driver_memory, "memory")
    memory: list[int] = []
    for line in sys.stdin:
        held.close()
        if line.strip() == "measured":
            measuring.close()
            say(taken=taken.nbytes, unmeasured=taken.unmeasured)
        else:
            work[line.strip()]()
            say(done=line.strip())


def allocated(nbytes: int) -> int:
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    return int(handle_return(driver.cuMemAlloc(nbytes)))


def free(address: int) -> None:
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    handle_return(driver.cuMemFree(address))


def launch(device: Any, partition: Any, name: str, argument: int) -> None:
    from cuda.core import LaunchConfig, Program, ProgramOptions, launch

    kernel = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{device.make_current().arch}")).compile("cubin").get_kernel(name)
    launch(partition.stream, LaunchConfig(grid=1, block=1), kernel, argument)


def run() -> None:
    try:
        main()
    except Exception as error:  # One of the driver's, or of ours.
        say(error=str(error))
        os._exit(3)


if __name__ == "__main__":
    run()
