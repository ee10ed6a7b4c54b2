"""The launch loop on a real GPU: it runs what is captured, answers as the worker does, and needs no interpreter."""

import ctypes
import select
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from engines import load_engine
from partitions import Device
from server.launch_loop.library import open_library
from server.link import ring
from server.link.messages import Done, Ticket
from server.workers.gil_priority import GilPriorities
from server.workers.placement import Placement
from server.workers.session import Endpoint
from server.workers.worker import Worker

from .bench import assert_close, expected
from .networks import NETWORKS, feed, plan

pytestmark = pytest.mark.gpu
SLOTS, CAPACITY = 16, 1 << 16
PATIENCE = 30_000
"""Milliseconds."""


class Tenant:
    """A tenant whose HTTP side is here; slot n has the bytes from n * CAPACITY on."""

    def __init__(self, device: Device, folder: Path, stack: ExitStack) -> None:
        self.network = NETWORKS["mlp"]()
        self.wanted = expected(self.network)
        engine = stack.enter_context(closing(load_engine(plan(folder, self.network), device)))
        partition = stack.enter_context(closing(device.carve([0, 1])))
        self.executor: Any = stack.enter_context(closing(engine.bind(partition)))
        descriptors = ring.create(SLOTS, SLOTS * CAPACITY)
        stack.callback(descriptors.close)
        self.http, link = ring.attach(descriptors), ring.attach(descriptors)
        memory = link.arena.memory
        self._pinned = stack.enter_context(closing(device.pin(memory.address, memory.nbytes)))
        self.worker = Worker(Placement(partition, {"mlp": self.executor}), print, GilPriorities())
        self._bytes = np.frombuffer(self.http.arena.memory.view, np.uint8).reshape(SLOTS, CAPACITY)
        self._serials = count(1)
        self._endpoint = Endpoint(link, self._pinned)

    def serve(self) -> None:
        self.worker.serve(self._endpoint)

    def put(self, slot: int, x: Any) -> None:
        self._bytes[slot, : x.nbytes] = x.view(np.uint8).ravel()
        ticket = Ticket(slot, next(self._serials), "mlp", (x.shape,), float("inf"), CAPACITY, slot * CAPACITY)
        self.http.tickets.write(ticket)
        self.http.tickets.put([ticket])

    def next(self) -> Done:
        poller = select.poll()
        poller.register(self.http.completions.event, select.POLLIN)
        while True:
            assert poller.poll(PATIENCE), "nothing was reported"
            if found := self.http.completions.take():
                (done,) = found
                return done

    def output(self, done: Done) -> Any:
        assert done.failure is None, done.failure
        (extent,) = done.outputs
        return self._bytes[done.slot, extent.offset : extent.offset + extent.nbytes].view(np.float32).reshape(extent.shape)

    @property
    def launched(self) -> int:
        return sum(int(each[0]) for each in self.executor._recipes._launched.values())


@pytest.fixture(scope="module")
def tenant(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenant]:
    assert open_library() is not None, "compile it: python -m server.launch_loop.library"
    with ExitStack() as stack:
        made = Tenant(device, tmp_path_factory.mktemp("loop"), stack)
        made.serve()
        stack.callback(made.worker.halt)
        yield made


def inputs(tenant: Tenant, rows: int, seed: int) -> dict[str, Any]:
    shapes = tenant.network.batch(rows)
    assert shapes
    return feed(tenant.network, shapes, seed)


def answered(tenant: Tenant, slot: int, rows: int, seed: int) -> None:
    given = inputs(tenant, rows, seed)
    (x,) = given.values()
    tenant.put(slot, x)
    assert_close([tenant.output(tenant.next())], tenant.wanted(given))


def test_captured_shapes_are_launched_by_the_loop_and_answers_are_right(tenant: Tenant) -> None:
    for rows in (1, 8):
        answered(tenant, 0, rows, 0)  # The worker's, from which the loop learns.
        before = tenant.launched
        for seed in range(40):
            answered(tenant, seed % SLOTS, rows, seed)
        assert tenant.launched >= before + 38


def test_worker_and_loop_take_turns_over_halts_and_overrides(tenant: Tenant) -> None:
    """More often than the ring of copy tables is long, so that host and device have to count alike."""
    for turn in range(20):
        answered(tenant, turn % SLOTS, 1, turn)
        with tenant.executor.overriding(graphs="off"):
            answered(tenant, turn % SLOTS, 1, turn)
        answered(tenant, turn % SLOTS, 1, turn)
        answered(tenant, turn % SLOTS, 8, turn)
        tenant.worker.halt()
        tenant.serve()


def test_completions_need_no_interpreter(tenant: Tenant, figures: dict[str, Any]) -> None:
    """Each is awaited with the GIL held, so that nothing else in this process can run Python meanwhile."""

    class File(ctypes.Structure):
        _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))

    for seed in range(2):
        answered(tenant, 0, 1, seed)
    file = File(tenant.http.completions.event, select.POLLIN)
    given = inputs(tenant, 1, 3)
    (x,) = given.values()
    took = []
    for turn in range(100):
        tenant.put(turn % SLOTS, x)
        began = perf_counter()
        assert ctypes.PyDLL(None).poll(ctypes.byref(file), 1, PATIENCE) == 1  # Blocks with the GIL.
        took.append((perf_counter() - began) * 1e6)
        assert_close([tenant.output(tenant.next())], tenant.wanted(given))
    figures["launch loop: p99 in us with the GIL held"] = round(sorted(took)[98], 1)
