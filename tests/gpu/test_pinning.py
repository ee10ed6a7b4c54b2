"""What pinning costs, and whom it stops: the reasons for `CudaDevice.pin` and for a tenant's memory being pinned at its start.

A neighbour on a partition of its own copies 3 KiB again and again meanwhile; its slowest copy is what a tenant would feel.
The figures are printed in the end, and written to $OUT/partitions.json where that is set.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from threading import Event, Thread
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from partitions.pages import touch
from server import arena
from server.arena import TensorMemory
from tests.load.copies import Carrier, carrier

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZE = 64 * MIB
TENANT = 512 * MIB
REST = 0.2
"""Seconds of quiet that a neighbour is timed for, to compare with."""


def fresh(nbytes: int) -> TensorMemory:
    """Memory as a tenant has, none of whose pages was touched."""
    descriptor = arena.create_memory(nbytes)
    try:
        return arena.attach_memory(descriptor, nbytes)
    finally:
        os.close(descriptor)


class Neighbour:
    """Copies 3 KiB on its own partition until it is stopped."""

    def __init__(self, partition: Any, own: Carrier) -> None:
        self._partition = partition
        self._carrier = own
        self._stop = Event()
        self._begun = Event()
        self._times: list[float] = []
        self._thread = Thread(target=self._run)
        self._thread.start()
        assert self._begun.wait(30)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def worst(self, action: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds that the action took, and the neighbour's slowest copy meanwhile."""
        first = len(self._times)
        began = perf_counter()
        action()
        took = perf_counter() - began
        enough = len(self._times) + 2
        while len(self._times) < enough:
            self._stop.wait(0.001)
        return took * 1e3, max(self._times[first:enough]) / 1e3

    def _run(self) -> None:
        self._partition.attach()
        for _ in range(100):
            self._carrier.once("sm")
        self._begun.set()
        while not self._stop.is_set():
            self._times.append(self._carrier.once("sm"))


@pytest.fixture
def neighbour(device: Any) -> Iterator[Neighbour]:
    with ExitStack() as made:
        partition, own = made.enter_context(carrier(device, [1], 3072))
        yield made.enter_context(closing(Neighbour(partition, own)))


def register(address: int, nbytes: int) -> None:
    from cuda.bindings import driver
    from cuda.core._utils.cuda_utils import handle_return

    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    handle_return(driver.cuMemHostRegister(address, nbytes, flags))


def unregister(address: int) -> None:
    from cuda.bindings import driver
    from cuda.core._utils.cuda_utils import handle_return

    handle_return(driver.cuMemHostUnregister(address))


@contextmanager
def registered(memory: TensorMemory, *sizes: int) -> Iterator[None]:
    """Its beginning, as pieces of these sizes side by side."""
    with ExitStack() as left:
        at = memory.address
        for size in sizes:
            register(at, size)
            left.callback(unregister, at)
            at += size
        yield


def quiet(neighbour: Neighbour) -> float:
    return neighbour.worst(lambda: Event().wait(REST))[1]


def test_pinning_at_once(device: Any, neighbour: Neighbour, figures: dict[str, Any]) -> None:
    device.make_current()
    found: dict[str, Any] = {"neighbour alone": quiet(neighbour)}
    untouched, touched = fresh(SIZE), fresh(SIZE)
    found["pin untouched"] = neighbour.worst(lambda: register(untouched.address, SIZE))
    found["touch"] = neighbour.worst(lambda: touch(touched.address, SIZE))
    found["pin touched"] = neighbour.worst(lambda: register(touched.address, SIZE))
    found["unpin"] = neighbour.worst(lambda: unregister(touched.address))
    unregister(untouched.address)
    figures["64 MiB at once: ms, and a neighbour's slowest 3 KiB meanwhile"] = found
    assert found["touch"][1] < 5, "touching takes no lock of the driver's"


@pytest.mark.parametrize("piece", [MIB // 4, MIB, 4 * MIB], ids=["256 KiB", "1 MiB", "4 MiB"])
def test_pinning_in_pieces(device: Any, neighbour: Neighbour, figures: dict[str, Any], piece: int) -> None:
    device.make_current()
    memory, pieces = fresh(SIZE), range(0, SIZE, piece)
    times: list[float] = []

    def each(call: Callable[[int], object]) -> None:
        for offset in pieces:
            began = perf_counter()
            call(memory.address + offset)
            times.append((perf_counter() - began) * 1e3)

    found: dict[str, Any] = {"neighbour alone": quiet(neighbour)}
    found["touch all"] = neighbour.worst(lambda: touch(memory.address, SIZE))
    found["pin all"] = neighbour.worst(lambda: each(lambda at: register(at, piece)))
    found["pin one, most"], times = max(times), []
    found["unpin all"] = neighbour.worst(lambda: each(unregister))
    found["unpin one, most"] = max(times)
    figures[f"64 MiB in pieces of {piece >> 10} KiB: ms, and a neighbour's slowest 3 KiB meanwhile"] = found


def test_a_tenant_s_memory_is_pinned_whole(device: Any, neighbour: Neighbour, figures: dict[str, Any]) -> None:
    memory, pins = fresh(TENANT), []
    found = neighbour.worst(lambda: pins.append(device.pin(memory.address, TENANT)))
    figures["512 MiB by CudaDevice.pin: ms, and a neighbour's slowest 3 KiB meanwhile"] = found
    assert device.is_pinned(memory.address, TENANT)
    figures["unpinning them"] = neighbour.worst(pins[0].close)


def test_a_copy_across_two_registrations(device: Any, figures: dict[str, Any]) -> None:
    """By the SMs it is right; what the copy engines say is written down, and no reason to fail."""
    from cuda.bindings import driver

    from engines.copies import EngineCopies, compile_kernels, open_copier

    current = device.make_current()
    memory, data = fresh(2 * MIB), np.random.default_rng(1).bytes(MIB)
    start = memory.address + MIB // 2
    memory.view[MIB // 2 : MIB // 2 + MIB] = data
    back = fresh(MIB)
    said: dict[str, str] = {}
    with ExitStack() as made:
        made.enter_context(registered(back, MIB))
        partition = made.enter_context(closing(device.carve([0])))
        target = made.enter_context(closing(current.allocate(MIB, stream=partition.stream)))
        copier = made.enter_context(closing(open_copier(current, partition.stream, compile_kernels(current), 1, 2)))
        for name, sizes in {"one": (2 * MIB,), "two": (MIB, MIB)}.items():
            with registered(memory, *sizes):
                copier.write(copier.table([(start, int(target.handle), MIB), (int(target.handle), back.address, MIB)]))
                copier.bring_in(partition.stream)
                copier.take_out(partition.stream)
                copier.count()
                partition.stream.sync()
                assert bytes(back.view) == data
                back.view[:] = bytes(MIB)
                (result,) = driver.cuMemcpyAsync(int(target.handle), start, MIB, partition.stream.handle)
                partition.stream.sync()
                said[name] = result.name
                if result == driver.CUresult.CUDA_SUCCESS:
                    engine = EngineCopies(0)
                    engine.write(engine.table([(int(target.handle), back.address, MIB)]))
                    engine.take_out(partition.stream)
                    partition.stream.sync()
                    assert bytes(back.view) == data
    figures["cuMemcpyAsync of 1 MiB that lies in one registration, and in two"] = said
    assert said["one"] == "CUDA_SUCCESS"
    assert memory.address % mmap.PAGESIZE == 0
