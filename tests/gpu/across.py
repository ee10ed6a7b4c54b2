"""`python -m tests.gpu.across`: copies of host memory that lies in one registration, and in two side by side; as JSON.

By kernels it is "right" or "wrong", by the copy engines what cuMemcpyAsync or the stream says. See test_pinning.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np

from partitions import open_device
from server.link import arena
from server.link.arena import TensorMemory

MIB = 1 << 20


def fresh(nbytes: int) -> TensorMemory:
    """Memory as a tenant has it, with no page touched yet."""
    descriptor = arena.create_memory(nbytes)
    try:
        return arena.attach_memory(descriptor, nbytes)
    finally:
        os.close(descriptor)


def register(address: int, nbytes: int) -> None:
    """Pin exactly this many bytes. The calling thread has the device's context current. Raises CUDAError."""
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    handle_return(driver.cuMemHostRegister(address, nbytes, flags))


def unregister(address: int) -> None:
    """Undo `register`."""
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    handle_return(driver.cuMemHostUnregister(address))


@contextmanager
def registered(memory: TensorMemory, *sizes: int) -> Iterator[None]:
    """The start of the memory, as adjacent pieces of these sizes."""
    with ExitStack() as left:
        at = memory.address
        for size in sizes:
            register(at, size)
            left.callback(unregister, at)
            at += size
        yield


def across(device: Any, *sizes: int) -> dict[str, str]:
    """The result of copying the middle MiB of two that are registered as pieces of these sizes."""
    from engines.cuda.copies import open_sm_copies

    current = device.make_current()
    memory, back, data = fresh(2 * MIB), fresh(MIB), np.random.default_rng(1).bytes(MIB)
    start = memory.address + MIB // 2
    memory.view[MIB // 2 : MIB // 2 + MIB] = data
    with ExitStack() as made:
        made.enter_context(registered(back, MIB))
        made.enter_context(registered(memory, *sizes))
        partition = made.enter_context(closing(device.carve([0])))
        target = made.enter_context(closing(current.allocate(MIB, stream=partition.stream)))
        copier = made.enter_context(closing(open_sm_copies(device, partition.stream, 1, 2)))
        copier.write(copier.table([(start, int(target.handle), MIB), (int(target.handle), back.address, MIB)]))
        copier.copy_in(partition.stream)
        copier.copy_out(partition.stream)
        partition.stream.sync()
        kernels = "right" if bytes(back.view) == data else "wrong"
        return {"kernels": kernels, "engines": _by_engines(partition.stream, start, int(target.handle))}


def _by_engines(stream: Any, source: int, target: int) -> str:
    from cuda.bindings import driver

    from partitions.cuda.driver import CUDAError

    (result,) = driver.cuMemcpyAsync(target, source, MIB, stream.handle)
    try:
        stream.sync()
    except CUDAError as error:
        return str(error)
    return str(getattr(result, "name", result))


def main() -> None:
    """Try both and print what was found."""
    with closing(open_device("cuda")) as device:
        print(json.dumps({"one": across(device, 2 * MIB), "two": across(device, MIB, MIB)}))


if __name__ == "__main__":
    main()
