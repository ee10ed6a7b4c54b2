"""The cost of pinning, and the work that it blocks: why `CudaDevice.pin` populates first, and pins in pieces.

A neighbour on a partition of its own copies 3 KiB again and again meanwhile; its slowest copy is what a tenant would feel.
The figures are printed in the end, and written to $OUT/partitions.json where that is set.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from threading import Event, Thread
from time import perf_counter
from typing import Any

import pytest

from partitions.cuda.pages import populate
from tests.gpu.across import MIB, fresh, register, unregister
from tests.gpu.carrier import Carrier, carrier

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SIZE = 64 * MIB
TENANT = 512 * MIB
FELT = 3.0
"""Milliseconds that a neighbour's slowest copy may take longer while a tenant's memory is pinned. In one call it took 17 ms."""
REST = 0.2
"""Seconds of quiet that a neighbour is timed for, to compare with."""


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
            self._carrier.once()
        self._begun.set()
        while not self._stop.is_set():
            self._times.append(self._carrier.once())


@pytest.fixture
def neighbour(device: Any) -> Iterator[Neighbour]:
    with ExitStack() as made:
        partition, own = made.enter_context(carrier(device, [1], 3072))
        yield made.enter_context(closing(Neighbour(partition, own)))


def quiet(neighbour: Neighbour) -> float:
    return neighbour.worst(lambda: Event().wait(REST))[1]


def test_pinning_at_once(device: Any, neighbour: Neighbour, figures: dict[str, Any]) -> None:
    device.make_current()
    found: dict[str, Any] = {"neighbour alone": quiet(neighbour)}
    untouched, touched = fresh(SIZE), fresh(SIZE)
    found["pin untouched"] = neighbour.worst(lambda: register(untouched.address, SIZE))
    found["populate"] = neighbour.worst(lambda: populate(touched.address, SIZE))
    found["pin touched"] = neighbour.worst(lambda: register(touched.address, SIZE))
    found["unpin"] = neighbour.worst(lambda: unregister(touched.address))
    unregister(untouched.address)
    figures["64 MiB at once: ms, and a neighbour's slowest 3 KiB meanwhile"] = found
    assert found["populate"][1] < 5, "touching takes no lock of the driver's"


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
    found["populate all"] = neighbour.worst(lambda: populate(memory.address, SIZE))
    found["pin all"] = neighbour.worst(lambda: each(lambda at: register(at, piece)))
    found["pin one, most"], times = max(times), []
    found["unpin all"] = neighbour.worst(lambda: each(unregister))
    found["unpin one, most"] = max(times)
    figures[f"64 MiB in pieces of {piece >> 10} KiB: ms, and a neighbour's slowest 3 KiB meanwhile"] = found


def test_a_tenant_s_memory_is_pinned_while_a_neighbour_is_served(
    device: Any, neighbour: Neighbour, figures: dict[str, Any]
) -> None:
    """As when a tenant comes from another GPU, or by a reload, and leaves again. The best of three, as machines have stalls."""
    memory = fresh(TENANT)
    found: dict[str, Any] = {"neighbour alone": quiet(neighbour), "pin": [], "unpin": []}
    figures["512 MiB by CudaDevice.pin: ms, and a neighbour's slowest 3 KiB meanwhile"] = found
    for _ in range(3):
        pins: list[Any] = []
        found["pin"].append(neighbour.worst(lambda pins=pins: pins.append(device.pin(memory.address, TENANT))))
        assert device.is_pinned(memory.address, TENANT)
        found["unpin"].append(neighbour.worst(pins[0].close))
    for felt in (found["pin"], found["unpin"]):
        assert min(worst for _, worst in felt) < found["neighbour alone"] + FELT


def test_a_copy_across_two_registrations(figures: dict[str, Any]) -> None:
    """In a process of its own: an error on the device may stay for the rest of the process."""
    ran = subprocess.run([sys.executable, "-m", "tests.gpu.across"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    figures["cuMemcpyAsync of 1 MiB, and kernels, where that lies in one registration, and in two"] = said
    assert said["one"] == {"kernels": "right", "engines": "CUDA_SUCCESS"}
