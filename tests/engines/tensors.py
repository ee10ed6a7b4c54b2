"""Host memory for tests: rooms whose written bytes can be checked, and tensors to and from arrays."""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from engines import Executor, Room, Tensor, wire
from engines.base import NO_ROOM
from engines.memory import view

Array = np.ndarray[Any, Any]

UNTOUCHED = 0xEE


class Memory:
    """Page-aligned memory, every byte UNTOUCHED at first; freed with this object, even if a room still refers to it."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.bytes[:] = UNTOUCHED
        self.room = Room(self.bytes.ctypes.data, nbytes)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the whole tensor is in this memory."""
        return self.room.address <= tensor.address and tensor.address + tensor.nbytes <= self.room.address + self.room.nbytes


def array(tensor: Tensor, dtype: Any = np.float32) -> Array:
    """A copy of a tensor's elements."""
    return np.frombuffer(bytes(view(tensor.address, tensor.nbytes)), dtype).reshape(tensor.shape)


def packed(elements: Sequence[bytes], shape: tuple[int, ...] | None = None) -> Tensor:
    """A BYTES tensor."""
    data = np.frombuffer(bytearray(wire.pack(elements)), np.uint8)
    return Tensor((len(elements),) if shape is None else shape, data.ctypes.data, data.nbytes, data)


def unpacked(tensor: Tensor) -> list[bytes]:
    """The elements of a BYTES tensor."""
    return wire.unpack(view(tensor.address, tensor.nbytes), int(np.prod(tensor.shape)))


def run(executor: Executor, *inputs: Array, room: Room = NO_ROOM, dtype: Any = np.float32) -> list[Array]:
    """Enqueue, wait, and copy the outputs."""
    work = executor.enqueue([Tensor.of(data) for data in inputs], room)
    return [array(tensor, dtype) for tensor in work.wait()]
