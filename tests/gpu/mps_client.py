"""A process with the GPU that it sees as device 0, for tests of MPS.

A line of JSON says whether it is a client of an MPS server, or the error. Then it does what lines on its standard input ask
for, and answers each with a line. What "hold" took it has until the next line: a client that is killed in work is a fault of
all. "measured" says what it took since "measure"; "copy" how many tickets there were for writing to the host, its own included.

The first argument is its granule, 0 without; the others are the descriptors of a deposit that processes share.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Any

import numpy as np

from engines.cuda.turns import LOOK, TURNS
from partitions import open_device
from partitions.cuda.driver_memory import Taken
from partitions.deposit import deposit_of
from partitions.mps import is_mps_client
from tests.engines.tensors import Memory

from .holding import Kernels

SOURCE = r"""
extern "C" __global__ void bad(long long at) { *(volatile int *)at = 1; }
extern "C" __global__ void spin(long long nanoseconds) {
    long long began, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - began < nanoseconds);
}
extern "C" __global__ void keep(long long at) {
    const unsigned mine = take_turn((struct Turn *)at);
    for (long long ended = 0; !ended; __nanosleep(1000)) ended = *(volatile long long *)at == -1;
    pass_turn((struct Turn *)at, mine);
}
extern "C" __global__ void small(long long at) {
    const volatile unsigned *words = (const volatile unsigned *)at;
    unsigned sum = 0;
    for (int again = 0; again < 4; ++again)
        for (int word = threadIdx.x; word < 1 << 16; word += blockDim.x) sum += words[word];
    if (sum == 1) *(unsigned *)at = 0;
}
"""
NOWHERE, LONG = 16, 10_000_000_000
MINUTE = 60_000_000_000
TAKES = 64 << 20
"""Bytes, of the device's memory."""
COPIED = 8 << 20
"""Bytes of an output, in one turn where no other process waits, else in up to 64."""
TIMED = 1000
"""Small kernels."""


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    device: Any = open_device("cuda")
    granule, *deposit = map(int, sys.argv[1:] or ["0"])
    if deposit:
        device.share(deposit_of(deposit))
    partition = device.carve([granule])
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
        "flood": lambda: held.enter_context(copies().flooding()),
        "keep": lambda: launch(device, partition, "keep", int(copies().turns.handle)),
        "measure": lambda: measuring.enter_context(taken.measuring(0)),
    }
    held, measuring, taken = ExitStack(), ExitStack(), Taken(device.driver_memory, "memory")
    memory: list[int] = []
    copies = cache(lambda: Copies(device, partition))
    for line in sys.stdin:
        held.close()
        if line.strip() == "small":
            say(microseconds=timed(device, partition))
        elif line.strip() == "copy":
            say(tickets=copies().once())
        elif line.strip() == "measured":
            measuring.close()
            say(taken=taken.nbytes, unmeasured=taken.unmeasured)
        else:
            work[line.strip()]()
            say(done=line.strip())


class Copies:
    """An output that the partition's SMs copy to the host."""

    def __init__(self, device: Any, partition: Any) -> None:
        from engines.cuda.copies import copy_kernels, open_sm_copies

        self.turns = copy_kernels(device).turns
        self._partition = partition
        self._copies = open_sm_copies(device, partition.stream, 0, 1)
        self._memory = Memory(COPIED)
        device.pin(*self._memory.room[:2])
        self._span = allocated(COPIED), self._memory.room.address, COPIED

    def once(self) -> int:
        """Copy it; how many tickets there were for writing since the words were made, of all processes that share them."""
        from cuda.bindings import driver

        from partitions.cuda.driver import handle_return

        stream = self._partition.stream
        self._copies.write(self._copies.table([self._span]))
        self._copies.copy_in(stream)
        self._copies.copy_out(stream)
        self._copies.count()
        stream.sync()
        words = np.empty(2, np.uint32)
        handle_return(driver.cuMemcpyDtoHAsync(words.ctypes.data, int(self.turns.handle), words.nbytes, stream.handle))
        stream.sync()
        return int(words[0])

    @contextmanager
    def flooding(self) -> Iterator[None]:
        """Copy it again and again meanwhile."""
        stop, begun = Event(), Event()

        def flood() -> None:
            self._partition.attach()
            while not stop.is_set():
                self.once()
                begun.set()

        thread = Thread(target=flood)
        thread.start()
        try:
            assert begun.wait(30)
            yield
        finally:
            stop.set()
            thread.join()


def timed(device: Any, partition: Any) -> float:
    """The median of some small kernels that read the GPU's memory, in microseconds."""
    from cuda.core import LaunchConfig, launch

    kernel, at, times = compiled(device, "small"), allocated(1 << 18), []
    for _ in range(TIMED):
        began = perf_counter()
        launch(partition.stream, LaunchConfig(grid=1, block=1024), kernel, at)
        partition.stream.sync()
        times.append((perf_counter() - began) * 1e6)
    free(at)
    return median(times)


def allocated(nbytes: int) -> int:
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    return int(handle_return(driver.cuMemAlloc(nbytes)))


def free(address: int) -> None:
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    handle_return(driver.cuMemFree(address))


def launch(device: Any, partition: Any, name: str, argument: int) -> None:
    from cuda.core import LaunchConfig, launch

    launch(partition.stream, LaunchConfig(grid=1, block=1), compiled(device, name), argument)


def compiled(device: Any, name: str) -> Any:
    from cuda.core import Program, ProgramOptions

    source = LOOK + TURNS + SOURCE
    return Program(source, "c++", ProgramOptions(arch=f"sm_{device.make_current().arch}")).compile("cubin").get_kernel(name)


def run() -> None:
    try:
        main()
    except Exception as error:  # One of the driver's, or of ours.
        say(error=str(error))
        os._exit(3)


if __name__ == "__main__":
    run()
