"""The seam to models: an engine is a model loaded once, an executor is one bound to a partition, work is in flight.

Tensors cross as addresses, so that the same call serves memory that another process shares, that a GPU has pinned, or that
a caller of this library has on the GPU already.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from partitions import Partition

from .arrays import borrow
from .datatypes import DataType
from .errors import TensorMismatch
from .memory import view
from .signature import ALIGNMENT, Shape, Signature, TensorSpec
from .streams import selected


class Tensor(NamedTuple):
    """Row-major, little-endian memory holding one tensor; BYTES in wire form. The host's, or the GPU's of the executor.

    Whoever made it keeps the memory alive, and unchanged while work is in flight; `owner` may be a reference that does so.
    """

    shape: tuple[int, ...]
    address: int
    nbytes: int
    owner: object = None

    @classmethod
    def of(cls, array: object, datatype: DataType | None = None) -> "Tensor":
        """A tensor over an array's own memory, which it keeps alive. Only a NumPy array that has gaps is copied.

        Any array will do that has `__dlpack__` or `__cuda_array_interface__`: PyTorch's, CuPy's, JAX's, on a GPU or not.
        What is still being written on a GPU has to be ready, or be written on the stream of `engines.on_stream`, inside
        whose block this is called. Raises TensorMismatch naming what came for gaps, for an element type that the protocol
        does not have, or that is not `datatype`.
        """
        if isinstance(array, np.ndarray):
            array = np.ascontiguousarray(array).reshape(array.shape)
        lent = borrow(array, selected())
        lent.check(datatype)
        return cls(lent.shape, lent.address, lent.nbytes, lent.owner)

    def array(self, datatype: DataType) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
        """The elements as an array of their own. Only for the host's memory.

        Not for BYTES either, whose wire form `engines.wire` splits.
        """
        return np.frombuffer(view(self.address, self.nbytes), datatype.numpy).reshape(self.shape).copy()


class Room(NamedTuple):
    """Memory that outputs may be written to, from an address that is a multiple of ALIGNMENT; by default none."""

    address: int = 0
    nbytes: int = 0

    @classmethod
    def of(cls, array: object) -> "Room":
        """The memory of an array of any kind that `Tensor.of` takes, which has to be kept alive by whoever has it.

        Outputs in a GPU's memory are for what runs there: `Tensor.array` cannot read them. Raises TensorMismatch for
        gaps, for memory that is read-only, and for an address that is not a multiple of ALIGNMENT.
        """
        lent = borrow(array, selected())
        lent.check()
        if lent.readonly:
            raise TensorMismatch(
                f"an array of shape {list(lent.shape)} is read-only; expected one that outputs may be written to"
            )
        if lent.address % ALIGNMENT:
            raise TensorMismatch(f"an array begins at {lent.address:#x}; expected an address that is a multiple of {ALIGNMENT}")
        return cls(lent.address, lent.nbytes)


NO_ROOM = Room()
"""No memory for outputs: each is answered in memory of its own."""


def check_tensors(signature: Signature, inputs: Sequence[Tensor]) -> None:
    """Raise TensorMismatch unless this is one tensor for each input, of as many bytes as its shape has.

    Shapes are not compared: see `Signature.check`. Takes a microsecond.
    """
    if len(inputs) != len(signature.inputs) or not all(isinstance(tensor, Tensor) for tensor in inputs):
        raise _mismatch(signature, inputs)
    for spec, tensor in zip(signature.inputs, inputs, strict=True):
        if spec.datatype.size and tensor.nbytes != spec.nbytes(tensor.shape):
            raise missized(spec, tensor)


def missized(spec: TensorSpec, tensor: Tensor) -> TensorMismatch:
    """The error of a tensor that has more or fewer bytes than its shape: what lies behind it would be read, or left."""
    shape, expected = list(tensor.shape), spec.nbytes(tensor.shape)
    return TensorMismatch(
        f"input {spec.name!r}: {tensor.nbytes} bytes for shape {shape} of {spec.datatype}; expected {expected}"
    )


def _mismatch(signature: Signature, inputs: Sequence[object]) -> TensorMismatch:
    """Why these are not what the model takes, by count and kind."""
    if isinstance(inputs, Tensor):
        text = "one Tensor by itself; expected a list with one for each of the model's inputs"
        return TensorMismatch(f"{text} ({signature.expected})")
    for spec, tensor in zip(signature.inputs, inputs, strict=False):
        if not isinstance(tensor, Tensor):
            came = f"{type(tensor).__module__}.{type(tensor).__name__}".removeprefix("builtins.")
            return TensorMismatch(f"input {spec.name!r}: a {came}; expected an engines.Tensor, as Tensor.of(array) makes it")
    return signature.miscounted(len(inputs), "tensor")


COUNTS = ("captures", "compilations", "padded", "staged", "fallbacks")
"""What executors count: graphs captured, kernels compiled while serving, inferences that ran padded to a larger batch and
that went through pinned memory of ours, and times that a faster way was given up."""


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

        One thread at a time. Raises TensorMismatch for what is not one tensor for each input, of a shape that passes
        `Signature.check` and of as many bytes as that has, and ExecutionFailed once it is closed.
        """

    def rebind(self, partition: Partition) -> "Executor":
        """The same set up on another partition, beside this one, ready for what this one is ready for. Blocks.

        Once the new one takes inferences this one may take none, nor have any in flight; to close either leaves the other.
        Raises ModelRefused.
        """

    def overriding(self, **changes: Any) -> AbstractContextManager[None]:
        """Other settings of `RuntimeSettings` in a block, for debugging for instance: `graphs`, `copies`, `batch_padding`.

        Afterwards, also when the block fails, those of before hold again, with all that was ready; overrides nest. Shapes
        are made ready anew within it, with the first inference of each. To begin and to end blocks for what is in flight.
        For every thread that enqueues. Raises TypeError for a setting that cannot be changed so, ValueError for a value,
        ModelRefused for what cannot be had without loading again.
        """

    def describe(self) -> Mapping[str, object]:
        """Which way its inferences run, in values that JSON has. Any thread; never waits, and asks no library.

        There is always `graphs`: "captured" where an inference is submitted as one CUDA graph of ours, "native" where the
        library's own graphs stand around the engine alone, "none" where there are no graphs. There may be:
        - `why`: why it is not captured though that was asked for.
        - `notes`: a list of texts that whoever runs the model should read: settings that have no effect, what fell back.
        - `counts`: numbers since it was bound, which only grow, by names of COUNTS; those that cannot occur are left out.
        - whatever else tells people how it runs, such as `copies`, `profiles`, `shapes`, `kernels` and `threads`.
        """

    def close(self) -> None:
        """Free what it holds on the partition. Work in flight is a bug of the caller. Calling it again does nothing."""


class Preparing(Executor, Protocol):
    """An executor that compiles for shapes which it has not run yet. One that never does need not have the method."""

    def preparing(self, shapes: Sequence[Shape]) -> "Future[None] | None":
        """None where an inference of these shapes, one for each input, can be enqueued without compiling for them first.

        Else a future that is done when it can be, and that fails with what `enqueue` would raise; the preparation has begun.
        Shapes that the signature does not allow are None, for `enqueue` to refuse. Does not block. The thread that enqueues.
        """


class Trimming(Executor, Protocol):
    """An executor that keeps memory of one inference for the next. One that keeps none need not have the method."""

    def trim(self, after: float, idle: bool) -> None:
        """Give back what no inference has needed for so many seconds. Any thread; neither while it is closed nor after.

        Where it is `idle`, at once, which blocks for as long as its smallest inference takes; else with the next inference.
        """


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
