"""Executors over the fake libcuda of tests/fake_cuda.c, to try everything without a GPU. Their figures mean nothing."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from ctypes import c_void_p
from typing import Any

import numpy as np

from engines import Engine, Executor, Recipe, Room, Signature, Tensor
from engines.base import NO_ROOM
from engines.datatypes import DATATYPES
from engines.signature import Shape, TensorSpec
from partitions import Device, Partition
from server.launch_loop.structures import MOST_AHEAD, address
from tests.fakes import FakeDevice
from tests.launchable import PENDING, address_of, open_fake_cuda

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
SIZES = {"tiny": (256, 32, 20_000), "mob": (602_112, 4_000, 240_000), "enc": (262_144, 262_144, 400_000)}
"""Of each model: bytes of the input and of the output, and nanoseconds that an inference takes."""


class _Work:
    def __init__(self, cuda: Any, event: c_void_p, outputs: tuple[Tensor, ...]) -> None:
        self._cuda = cuda
        self._event = event
        self._outputs = outputs

    def wait(self) -> tuple[Tensor, ...]:
        self._cuda.cuEventSynchronize(self._event)
        return self._outputs

    def cancel(self) -> None:
        """Do nothing, as on a GPU."""


class FakeModel:
    """An engine of one input and one output, and its own executor: the output is the input's bytes plus 1, repeated."""

    platform = "fake"
    by_shape = False
    memory: Mapping[str, int] = {}
    executor_memory: Mapping[str, int] = {}

    def __init__(self, cuda: Any, name: str, partition: Partition) -> None:
        size, answer, duration = SIZES[name]
        self.name = name
        self.partition = partition
        self.executor: Executor = self
        self.engine: Engine = self
        self.shapes: tuple[Shape, ...] = ((size,),)
        self.signature = Signature(
            (TensorSpec("x", DATATYPES["UINT8"], (size,)),), (TensorSpec("y", DATATYPES["UINT8"], (answer,)),)
        )
        self._cuda = cuda
        self._answer = answer
        self._tables = np.zeros((MOST_AHEAD, 2, 3), np.uint64)
        self._memory = [np.zeros(nbytes, np.uint8) for nbytes in (size, answer)]
        self._counts = np.zeros(3, np.uint64)  # On the host, on the device, launched by recipes.
        self._stream = c_void_p(cuda.fake_stream())
        table, state = address(self._tables.data), address(self._counts[1:].data)
        self._graph = c_void_p(cuda.fake_graph(duration, table, MOST_AHEAD, 2, 1, state, None))
        self._events = [c_void_p() for _ in range(MOST_AHEAD)]
        for event in self._events:
            cuda.cuEventCreate(ctypes.byref(event), 0)

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> _Work:
        at = int(self._counts[0]) % MOST_AHEAD
        event = self._events[at]
        self._cuda.cuEventSynchronize(event)  # Its last inference may still be running.
        (x,), (source, target) = inputs, self._addresses()
        table = [(x.address, source, x.nbytes), (target, room.address, self._answer)]
        self._tables[at] = table
        self._cuda.cuGraphLaunch(self._graph, self._stream)
        self._cuda.cuEventRecord(event, self._stream)
        self._counts[0] += np.uint64(1)
        return _Work(self._cuda, event, (Tensor((self._answer,), room.address, self._answer),))

    def rebind(self, partition: Partition) -> "FakeModel":
        return FakeModel(self._cuda, self.name, partition)

    def bind(self, partition: Partition) -> "FakeModel":
        return self.rebind(partition)

    def alternate(self, partition: Partition) -> "FakeModel":
        return self.rebind(partition)

    def overriding(self, **changes: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def describe(self) -> dict[str, object]:
        return {"graphs": "captured"}

    def recipe(self, shapes: Sequence[Shape], revoke: Callable[[], None]) -> Recipe:
        return Recipe(
            address_of(self._cuda.cuGraphLaunch),
            address_of(self._cuda.cuEventRecord),
            address_of(self._cuda.cuEventQuery),
            PENDING,
            self._graph.value or 0,
            self._stream.value or 0,
            tuple([event.value or 0 for event in self._events]),
            address(self._tables.data),
            address(self._counts.data),
            address(self._counts[2:].data),
            self._addresses(),
            ((self._answer,),),
            lambda result: RuntimeError(f"the driver returned {result}"),
        )

    @property
    def launched(self) -> int:
        return int(self._counts[2])

    def draw(self, seed: int) -> Bytes:
        return np.random.default_rng(seed).integers(0, 256, self.shapes[0][0], np.uint8)

    def differs(self, got: Bytes, wanted: Bytes) -> bool:
        return bool((got != wanted).any())

    def close(self) -> None:
        """Wait for the stream, and end it."""
        self._cuda.fake_stream_close(self._stream)
        self._cuda.fake_graph_close(self._graph)
        for event in self._events:
            self._cuda.cuEventDestroy_v2(event)

    def _addresses(self) -> tuple[int, ...]:
        return tuple(address(memory.data) for memory in self._memory)


class FakeBench:
    """As `on_cuda.CudaBench`."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._device = FakeDevice((8,) * 16)
        self.device: Device = self._stack.enter_context(closing(self._device))
        self.cuda = open_fake_cuda()

    def carve(self, granules: Sequence[int]) -> Partition:
        return self._stack.enter_context(closing(self.device.carve(granules)))

    def bind(self, name: str, partition: Partition) -> FakeModel:
        model = FakeModel(self.cuda, name, partition)
        self._stack.enter_context(closing(model))
        return model

    def close(self) -> None:
        self._stack.close()
