"""A tenant of the comparison: a link, a driver process, and workers with and without the launch loop that take turns."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from engines import Executor, Room, Tensor
from engines.signature import Shape
from partitions import Device, DeviceLost, Partition
from server.link import ring
from server.link.blocks import block_size
from server.link.encoding import encode_request
from server.workers.gil_priority import GilPriorities
from server.workers.placement import Placement
from server.workers.session import Endpoint
from server.workers.worker import Worker

from .driver import Driver, Load

KEY = "loop/1#1"
INPUTS = 4
"""Different inputs; slot n has input n % INPUTS."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Model(Protocol):
    """A model with one input and one output on a partition; see `on_cuda.CudaModel`."""

    @property
    def name(self) -> str: ...

    @property
    def executor(self) -> Executor: ...

    @property
    def partition(self) -> Partition: ...

    @property
    def shapes(self) -> tuple[Shape, ...]: ...

    @property
    def launched(self) -> int:
        """How many inferences the launch loop has launched."""

    def draw(self, seed: int) -> Bytes: ...

    def differs(self, got: Bytes, wanted: Bytes) -> bool: ...


class Variant(NamedTuple):
    """What serves the link: the worker with the launch loop, or without."""

    name: str
    loop: bool


class Tenant:
    """Its slots have memory of one size each, slot n from n * `capacity` on. Close it to end its driver."""

    def __init__(self, device: Device, model: Model, slots: int, priorities: GilPriorities) -> None:
        self.model = model
        self.slots = slots
        self.looped = False
        """Whether the loop has launched anything since the last variant began to serve."""
        signature = model.executor.engine.signature
        self._input = model.draw(0).nbytes
        self._place = -(-self._input // 64) * 64
        self._answer = signature.output_bytes(signature.check(model.shapes))
        self.capacity = block_size(self._place + self._answer)
        self._descriptors = ring.create(slots, slots * self.capacity)
        self._link = ring.attach(self._descriptors)
        memory = self._link.arena.memory
        self._pinned = device.pin(memory.address, memory.nbytes)
        self._bytes = np.frombuffer(memory.view, np.uint8).reshape(slots, self.capacity)
        self._wanted = [self._answer_to(model.draw(seed)) for seed in range(INPUTS)]
        for slot in range(slots):
            self._bytes[slot, : self._input] = model.draw(slot % INPUTS)
        self._workers = {
            loop: Worker(Placement(model.partition, {KEY: model.executor}), _raise, priorities, launch_loop=loop)
            for loop in (False, True)
        }
        self.driver = Driver(self._descriptors)

    def load(self, outstanding: int, seconds: float, rate: float = 0.0) -> Load:
        """For the driver."""
        return Load(encode_request(KEY, self.model.shapes), self.capacity, min(outstanding, self.slots), seconds, rate)

    @contextmanager
    def served_by(self, variant: Variant) -> Iterator[None]:
        """Serve the link in the block. Outputs are blank at its beginning."""
        self._bytes[:, self._place :] = 0
        before = self.model.launched
        worker = self._workers[variant.loop]
        worker.serve(Endpoint(self._link, self._pinned))
        try:
            yield
        finally:
            worker.halt()
            self.looped = self.model.launched > before

    def wrong(self, slots: list[int]) -> int:
        """In how many of these slots the output is not the right one."""
        outputs = self._bytes[:, self._place :]
        return sum(
            self.model.differs(outputs[slot, : wanted.nbytes].copy(), wanted)
            for slot, wanted in ((slot, self._wanted[slot % INPUTS]) for slot in slots)
        )

    def ask(self, slot: int) -> tuple[list[Tensor], Room]:
        """The arguments of `Executor.enqueue` for this slot."""
        at = self._link.arena.memory.address + slot * self.capacity
        room = Room(at + self._place, self.capacity - self._place)
        return [Tensor(self.model.shapes[0], at, self._input)], room

    def close(self) -> None:
        """End the driver; nothing serves the link any more. Partition and executor stay."""
        self.driver.close()
        self._pinned.close()
        self._descriptors.close()

    def _answer_to(self, x: Bytes) -> Bytes:
        """What the executor answers in slot 0."""
        self._bytes[0, : self._input] = x

        def run() -> Bytes:
            (output,) = self.model.executor.enqueue(*self.ask(0)).wait()
            return self._bytes[0, self._place : self._place + output.nbytes].copy()

        return self.model.partition.run(run)


def _raise(error: DeviceLost) -> None:
    raise error
