"""The protocols that every library's package implements: an engine is a loaded model, an executor binds it to a partition,
work is in flight.

Tensors are passed as addresses, so that the same call works for memory shared with another process, pinned memory, and memory
on the GPU.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from partitions import Partition

from .arrays import view_array
from .datatypes import DataType
from .errors import Cancelled, TensorMismatch
from .memory import view
from .signature import ALIGNMENT, Shape, Signature, TensorSpec
from .streams import selected


class Tensor(NamedTuple):
    """Row-major, little-endian memory of one tensor, on the host or on the executor's GPU; BYTES in wire form.

    The caller keeps the memory alive, and unchanged while work is in flight; `owner` may be a reference that does so.
    """

    shape: tuple[int, ...]
    address: int
    nbytes: int
    owner: object = None

    @classmethod
    def of(cls, array: object, datatype: DataType | None = None) -> "Tensor":
        """A tensor over an array's memory, which it keeps alive. Only a NumPy array that is not contiguous is copied.

        Takes any array that has `__dlpack__` or `__cuda_array_interface__`: PyTorch's, CuPy's, JAX's, on a GPU or not. An
        array that is still being written on a GPU must be written on the stream of an `engines.on_stream` block in which this
        is called. Raises TensorMismatch for an array that is not contiguous, for an element type that the protocol does not
        have, or that is not `datatype`.
        """
        if isinstance(array, np.ndarray):
            array = np.ascontiguousarray(array).reshape(array.shape)
        memory = view_array(array, selected())
        memory.check(datatype)
        return cls(memory.shape, memory.address, memory.nbytes, memory.owner)

    def array(self, datatype: DataType) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
        """A copy of the elements as a NumPy array. For host memory only, and not for BYTES, which `engines.wire` splits."""
        return np.frombuffer(view(self.address, self.nbytes), datatype.numpy).reshape(self.shape).copy()


class Room(NamedTuple):
    """Memory that outputs may be written to. Its address is a multiple of ALIGNMENT; the default is no memory.

    Bit n of `unasked` is set if the output at position n is not wanted. An executor may leave it out: then its tensor is
    `left_out`. The others are where they would be if the model did not have it.
    """

    address: int = 0
    nbytes: int = 0
    unasked: int = 0

    @classmethod
    def of(cls, array: object) -> "Room":
        """The memory of an array of any kind that `Tensor.of` takes. The caller keeps it alive.

        A room in GPU memory is for outputs that are used there: `Tensor.array` cannot read them. Raises TensorMismatch for an
        array that is not contiguous or read-only, and for an address that is not a multiple of ALIGNMENT.
        """
        memory = view_array(array, selected())
        memory.check()
        if memory.readonly:
            raise TensorMismatch(
                f"an array of shape {list(memory.shape)} is read-only; expected one that outputs may be written to"
            )
        if memory.address % ALIGNMENT:
            raise TensorMismatch(
                f"an array begins at {memory.address:#x}; expected an address that is a multiple of {ALIGNMENT}"
            )
        return cls(memory.address, memory.nbytes)

    @property
    def left_out(self) -> Tensor:
        """What stands for an output that was not asked for: no bytes, at the room's start."""
        return Tensor((), self.address, 0)


NO_ROOM = Room()
"""No memory for outputs: they are allocated."""


def check_tensors(signature: Signature, inputs: Sequence[Tensor]) -> None:
    """Raise TensorMismatch unless there is one tensor for each input, with as many bytes as its shape takes.

    Shapes are checked by `Signature.check`. Takes a microsecond.
    """
    if len(inputs) != len(signature.inputs) or not all(isinstance(tensor, Tensor) for tensor in inputs):
        raise _mismatch(signature, inputs)
    for spec, tensor in zip(signature.inputs, inputs, strict=True):
        if spec.datatype.size and tensor.nbytes != spec.nbytes(tensor.shape):
            raise missized(spec, tensor)


def missized(spec: TensorSpec, tensor: Tensor) -> TensorMismatch:
    """The error for a tensor that has more or fewer bytes than its shape: memory behind it would be read, or part of it
    ignored.
    """
    shape, expected = list(tensor.shape), spec.nbytes(tensor.shape)
    return TensorMismatch(
        f"input {spec.name!r}: {tensor.nbytes} bytes for shape {shape} of {spec.datatype}; expected {expected}"
    )


def _mismatch(signature: Signature, inputs: Sequence[object]) -> TensorMismatch:
    """The error for arguments that are not one Tensor for each input."""
    if isinstance(inputs, Tensor):
        text = "one Tensor by itself; expected a list with one for each of the model's inputs"
        return TensorMismatch(f"{text} ({signature.expected})")
    for spec, tensor in zip(signature.inputs, inputs, strict=False):
        if not isinstance(tensor, Tensor):
            came = f"{type(tensor).__module__}.{type(tensor).__name__}".removeprefix("builtins.")
            return TensorMismatch(f"input {spec.name!r}: a {came}; expected an engines.Tensor, as Tensor.of(array) makes it")
    return signature.miscounted(len(inputs), "tensor")


MEMORY = ("weights", "contexts", "buffers", "kernels", "graphs", "file", "session")
"""The kinds of memory that engines and executors take of the device. On a GPU: the weights of a plan, the scratch memory of its
execution contexts (activations), the tensors of inputs and outputs, and what the driver was seen to take for compiled kernels
and for captured graphs; these two are left out where it was not seen to take anything. On a CPU, whose memory is the host's:
the copy of the file that an engine keeps, and an ONNX Runtime session, with its own copy of the weights and its arena.
"""

COUNTS = ("captures", "compilations", "padded", "staged", "fallbacks")
"""The counters of executors: graphs captured, kernels compiled while serving, inferences padded to a larger batch, inferences
that were staged through pinned memory, and fallbacks from captured graphs.
"""


class Work(Protocol):
    """One inference that was enqueued. Both methods may be called from any thread."""

    def wait(self) -> tuple[Tensor, ...]:
        """Block until it has ended, without the GIL while the device works, and return the outputs in the signature's order.

        Outputs are in the room if their size was known beforehand and they fit, and otherwise in memory that they own. Raises
        ExecutionFailed, or Cancelled after `cancel`.
        """

    def cancel(self) -> None:
        """Ask it to end early. Does not block. The memory is in use until `wait` returns."""


def wait_within(work: Work, seconds: float | None) -> Sequence[Tensor]:
    """The outputs of a work that no request asks for; after so many seconds it is cancelled. None: there is no limit.

    Blocks. Raises as `Work.wait` does, Cancelled with how long it took.
    """
    if seconds is None:
        return work.wait()
    timer = threading.Timer(seconds, work.cancel)
    timer.daemon = True
    timer.start()
    try:
        return work.wait()
    except Cancelled as error:
        raise Cancelled(f"it had not ended after {seconds:g} s, and was stopped") from error
    finally:
        timer.cancel()


class Executor(Protocol):
    """An engine bound to one partition."""

    @property
    def engine(self) -> "Engine":
        """The engine that is bound; bind it again for another partition."""

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> Work:
        """Put one inference on the partition's stream and return without waiting for it. The works of a stream end in order.

        One thread at a time. Raises TensorMismatch unless there is one tensor for each input, of a shape that passes
        `Signature.check` and with as many bytes as that takes; ExecutionFailed once it is closed.
        """

    def rebind(self, partition: Partition) -> "Executor":
        """An executor of the same engine on another partition, with the same shapes ready. Blocks; this one may serve
        meanwhile.

        Once the new one takes inferences, this one must not take any or have any in flight. Closing one leaves the other
        usable. Raises ModelRefused.
        """

    def alternate(self, partition: Partition) -> "Executor":
        """An executor of the same engine on another partition of the same holder, with the same shapes ready. Blocks; this one
        may serve meanwhile.

        Both stay usable and take turns: either takes inferences while the other has none in flight, so it costs this one
        nothing while it is not used. There may be several, also alternates of alternates, and all of them take turns; each can
        be closed at any time, and `rebind` of one gives an executor that takes its place. An answer in parts goes on in any of
        them. Shapes that become ready in one of them later become ready in another when they are first asked for there, which
        compiles nothing on a GPU unless the engine has a profile for each of the two sizes. Raises ModelRefused.
        """

    def overriding(self, **changes: Any) -> AbstractContextManager[None]:
        """A context manager that changes settings of this executor, such as for debugging: `graphs`, `copies`, `batch_padding`.

        Inside the `with` statement each shape is prepared at its first inference. At its end, also after an exception, the
        previous settings apply and the shapes that were ready before are ready again. `with` statements may be nested, and
        apply to every thread that enqueues. Entering and exiting block until work in flight has ended. Raises TypeError for a
        setting that cannot be overridden, ValueError for a wrong value, ModelRefused for a setting that takes effect only when
        the model is loaded.
        """

    def describe(self) -> Mapping[str, object]:
        """How its inferences run, as JSON values. Any thread; never blocks, and calls no library.

        There is always `graphs`: "captured" if an inference is one CUDA graph that holds copies and engine, "native" if the
        library's own graphs hold the engine alone, "none" without graphs. There may be:
        - `why`: why nothing is captured though that was asked for.
        - `notes`: a list of texts for the operator: settings that have no effect, fallbacks.
        - `adds`: of an alternate, what `memory` counts of it and not of the executor that it was made of: {} if all is shared.
        - `counts`: numbers since it was bound, which only grow, by names of COUNTS; those that cannot occur are left out.
        - `missing_sms`: how many SMs the partition has fewer than a profile is meant for that is in use.
        - `driver_memory`: `kernels` and `graphs` as in MEMORY, kernels in full though others may share them, and how many
          kernels and graphs are `unmeasured`: it is not known what the driver took for these sets of shapes.
        - `kernels`: bytes of compiled kernels `found` in the cache and last `saved` there, and whether those were `refused`.
        - `verified`: how many sets of shapes were found to be `right`, and the `others`, each with its `shapes`, its `verdict`
          ("wrong" or "unverified"), `why`, and what is done: `runs_as`, other shapes, or `refused`.
        - anything else that explains how it runs, such as `copies`, `profiles`, `shapes` and `threads`.
        """

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of the device's memory that it takes, beside its engine, by names of MEMORY. Any thread; calls no library.

        What two executors share counts at both: one that `rebind` made, and the one before. What executors of several engines
        share is in `Sharing.shared_memory` and does not count here. Small things do not count: streams and events.
        """

    def close(self) -> None:
        """Free what it holds on the partition. No work may be in flight. Calling it again does nothing."""


class Preparing(Executor, Protocol):
    """An executor that compiles for new shapes. One that never compiles need not have the method."""

    def preparing(self, shapes: Sequence[Shape]) -> "Future[None] | None":
        """None if an inference of these shapes, one for each input, can be enqueued without compiling for them first.

        Otherwise start to compile, and return a future that is done when the shapes are ready; if compiling fails, it has the
        exception that `enqueue` would raise. None also for shapes that the signature does not allow, because `enqueue` refuses
        them. Does not block. Call it on the thread that enqueues.
        """

    def make_ready(self, sets: Iterable[Sequence[Shape]]) -> None:
        """Compile for each of these sets of input shapes that is not ready, before the executor serves. Blocks.

        What cannot be made ready is logged, and left to the first inference. An executor may lack this method.
        """


class Sharing(Executor, Protocol):
    """An executor that shares memory with executors of other engines. Others need not have the property."""

    @property
    def shared_memory(self) -> Mapping[Hashable, Mapping[str, int]]:
        """Bytes of the device's memory by names of MEMORY, by what it is that executors share, which is equal for the same
        thing. Any thread; calls no library.
        """


class Streaming(Executor, Protocol):
    """An executor of a model that answers in parts (`Signature.in_parts`). Others need not have the method.

    Each part is a work: `enqueue` begins an answer, and its work gives the first part; `proceed` gives the next. The outputs of
    a part are as those of any work. `wait` returns no outputs, (), once the answer has ended; a work that fails or is cancelled
    ends its answer too. Between two parts nothing runs and nothing is in flight: an answer that is not gone on with
    takes memory only, which is freed with the last reference to its work.
    """

    def proceed(self, part: Work, room: Room = NO_ROOM) -> Work:
        """Put the next part of an answer on the partition's stream and return without waiting for it.

        `part` is the work of the part before, which has ended with outputs. It may be of another executor of the same engine,
        also of one that is closed: an answer goes on after `rebind`. The inputs of `enqueue` are not read again. One thread at
        a time, as for `enqueue`. Raises ExecutionFailed once it is closed, and for an answer that has ended, or gone on before.
        """


class Recipe(NamedTuple):
    """What it takes to launch inferences of one set of shapes without the interpreter. All numbers are addresses unless said.

    Inference n of an executor, n being the uint64 at `counted`, uses table and event n modulo their number. Launching it is to
    - write its table at `tables`: for each input, then each output, three uint64, which are source, target and size in bytes.
      Inputs are copied to `addresses` from anywhere in memory that `Device.pin` pinned, outputs from there;
    - call `int launch(graph, stream)`, and if that returns 0, add 1 to `counted` and to `launched`;
    - call `int record(event, stream)`, and then `int query(event)` until that is 0: the inference has ended. Before that it is
      `pending`, a number.
    Any other result is an error: `failure(result)` blocks until the device uses no memory of the caller, and returns the
    exception that `Work.wait` would raise. Functions are called on a thread attached to the partition, one at a time.
    """

    launch: int
    record: int
    query: int
    pending: int
    graph: int
    stream: int
    events: tuple[int, ...]
    tables: int
    counted: int
    launched: int
    addresses: tuple[int, ...]
    outputs: tuple[Shape, ...]
    """The shapes of the outputs."""
    failure: Callable[[int], Exception]


class DeviceTime(Protocol):
    """What the device itself has measured of one executor's works. Any thread; never blocks. Both numbers only grow.

    They may lack the last work until the next one begins, or the executor is closed.
    """

    @property
    def ns(self) -> int:
        """Nanoseconds that they ran, copies included, and without waiting for works before them."""

    @property
    def works(self) -> int:
        """How many they were."""

    @property
    def closed(self) -> bool:
        """Whether the executor was closed: these numbers are final."""


class Timed(Executor, Protocol):
    """An executor whose works the device measures. Others need not have the property."""

    @property
    def device_time(self) -> DeviceTime | None:
        """What it has measured since it was bound; None if it does not. The same object each time."""


class Streamed(Executor, Protocol):
    """An executor of a model whose weights may stay on the host. Others need not have the property."""

    @property
    def streamed(self) -> int:
        """Bytes of weights that each work moves to the device. Any thread; calls no library."""


class Launchable(Executor, Protocol):
    """An executor whose inferences can be launched without the interpreter. Others need not have the method."""

    def recipe(self, shapes: Sequence[Shape], revoke: Callable[[], None]) -> Recipe | None:
        """How to launch inferences of these shapes; None if they cannot be launched so, or not now.

        The caller keeps a reference to the executor, and has nothing in flight by a recipe while it calls `enqueue`. When a
        recipe, or an answer None, is no longer right, the executor calls `revoke`, on any thread and with locks held: that
        blocks until nothing is in flight by recipes of this executor and none will be used again. It may be called at any later
        time, also several times. Any thread; one caller's recipes at a time.
        """


class Trimming(Executor, Protocol):
    """An executor that keeps memory of one inference for the next. One that keeps none need not have the method."""

    def trim(self, after: float, idle: bool) -> None:
        """Free memory that no inference has needed for `after` seconds. Any thread, but not during or after `close`.

        If `idle`, it is freed now, which blocks for as long as the executor's smallest inference takes. Otherwise the next
        inference frees it.
        """


class Engine(Protocol):
    """A model that is loaded once, and from which executors are bound."""

    @property
    def signature(self) -> Signature:
        """The model's inputs and outputs; `max_batch` is 0 unless the file itself has one."""

    @property
    def platform(self) -> str:
        """`<project>_<format>` as in the Open Inference Protocol."""

    @property
    def by_shape(self) -> bool:
        """Whether its library makes kernels for each shape.

        Then a new shape takes long to get ready, batches may be padded to ready ones (`RuntimeSettings.batch_padding`), FP32
        may be rounded to TF32 in products, and one shape may be answered wrongly where others are not.
        """

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of the device's memory that it takes itself, by names of MEMORY, until it is closed. Any thread."""

    @property
    def executor_memory(self) -> Mapping[str, int]:
        """What an executor is expected to take, before there is one; `Executor.memory` is what it takes. Any thread."""

    def bind(self, partition: Partition) -> Executor:
        """Bind it to a partition and run it there once, so that the first request does not wait. Blocks, perhaps for seconds.

        Raises ModelRefused.
        """

    def close(self) -> None:
        """Free the model; its executors must be closed before."""
