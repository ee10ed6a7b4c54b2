"""The seam to models: an engine is a model loaded once, an executor is one bound to a partition, work is in flight.

Tensors cross as host addresses, so that the same call serves memory that another process shares and a GPU has pinned.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from partitions import Partition

from .datatypes import DataType
from .memory import view
from .signature import Signature


class Tensor(NamedTuple):
    """Row-major, little-endian host memory holding one tensor; BYTES in wire form.

    Whoever made it keeps the memory alive, and unchanged while work is in flight; `owner` may be a reference that does so.
    """

    shape: tuple[int, ...]
    address: int
    nbytes: int
    owner: object = None

    @classmethod
    def of(cls, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> "Tensor":
        """A tensor over an array's own memory, or over a copy where it is not contiguous."""
        array = np.ascontiguousarray(array).reshape(array.shape)
        return cls(array.shape, array.ctypes.data, array.nbytes, array)

    def array(self, datatype: DataType) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
        """The elements as an array of their own. Not for BYTES, whose wire form `engines.wire` splits."""
        return np.frombuffer(view(self.address, self.nbytes), datatype.numpy).reshape(self.shape).copy()


class Room(NamedTuple):
    """Host memory that outputs may be written to, from an address that is a multiple of ALIGNMENT; by default none."""

    address: int = 0
    nbytes: int = 0


NO_ROOM = Room()
"""No memory for outputs: each is answered in memory of its own."""


class Work(Protocol):
    """One inference that was enqueued. Both methods may be called from any thread."""

    def wait(self) -> tuple[Tensor, ...]:
        """Block until it ended, without the GIL while the device works, and return the outputs in the signature's order.

        Outputs lie in the room given where their size was known beforehand and fitted, elsewhere in memory they own.
        Raises ExecutionFailed, or Cancelled after `cancel`.
        """

    def cancel(self) -> None:
        """Ask it to end early. Does not block; `wait` still says when its memory is free again."""


class Executor(Protocol):
    """An engine bound to one partition."""

    @property
    def engine(self) -> "Engine":
        """What is bound here; bind it again for another partition."""

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> Work:
        """Put one inference on the partition's stream and return without waiting for it. Works of one stream end in order.

        Shapes must have passed `Signature.check`. One thread at a time.
        """

    def close(self) -> None:
        """Free what it holds on the partition. Work in flight is a bug of the caller. Calling it again does nothing."""


class Engine(Protocol):
    """A model loaded once, from which executors are bound."""

    @property
    def signature(self) -> Signature:
        """What it takes and gives; `max_batch` 0 unless the file itself says otherwise."""

    @property
    def platform(self) -> str:
        """`<project>_<format>` as in the Open Inference Protocol."""

    def bind(self, partition: Partition) -> Executor:
        """Set it up on a partition and run it once there, so that the first request pays nothing. Blocks, perhaps for seconds.

        Raises ModelRefused.
        """

    def close(self) -> None:
        """Free the model; its executors must be closed before."""
