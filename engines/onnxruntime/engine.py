"""ONNX models on ONNX Runtime: one session a partition, with its threads on that partition's cores.

A session's threads inherit the cores of the thread that creates it, so sessions are created on an attached thread. They do not
spin while idle, which would cost other programs on the machine. Those for other cores than the partition's home are moved there
(`CpuPartition.run_with_helpers`).
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime as ort

from partitions import Partition
from partitions.cpu import CpuPartition

from ..base import NO_ROOM, Room, Tensor, check_tensors, wait_within
from ..datatypes import DATATYPES
from ..errors import Cancelled, ExecutionFailed, ModelRefused, OutputsTooLarge, TensorMismatch
from ..memo import Memo
from ..memory import SMALL
from ..model_files.onnx_file import unranked_outputs
from ..settings import RuntimeSettings, overridden
from ..signature import Shape, Signature, TensorSpec, dimension_name
from ..warmup import blank, shape_sets, usual_shapes, warm_up_failed
from .arenas import SHRINK, heap_bytes, is_unsized, limited, refused, weights_beside
from .errors import is_wrong_shape
from .model_copy import ModelCopy, copy_model
from .outputs import OnnxWork, Outputs, to_tensor
from .session import Runner, open_session, session_options
from .texts import FEW, of_array, to_array, to_value, with_default

log = logging.getLogger("greenlane.engines")

# ONNX Runtime's names, with the numbers of onnx.TensorProto.DataType that its bindings take.
_TYPES = {
    "float": ("FP32", 1), "uint8": ("UINT8", 2), "int8": ("INT8", 3), "uint16": ("UINT16", 4), "int16": ("INT16", 5),
    "int32": ("INT32", 6), "int64": ("INT64", 7), "string": ("BYTES", 8), "bool": ("BOOL", 9), "float16": ("FP16", 10),
    "double": ("FP64", 11), "uint32": ("UINT32", 12), "uint64": ("UINT64", 13), "bfloat16": ("BF16", 16),
}  # fmt: skip
_NUMBERS = dict(_TYPES.values())

DEFAULTS = RuntimeSettings()


class OnnxEngine:
    """An ONNX file, read once; see `engines.base.Engine` for the contract."""

    platform = "onnxruntime_onnx"
    by_shape = False

    def __init__(
        self,
        path: Path,
        model: ModelCopy,
        signature: Signature,
        warm_up: Sequence[Sequence[Shape]],
        settings: RuntimeSettings = DEFAULTS,
        left_out: Sequence[str] = (),
        unranked: bool = False,
    ) -> None:
        """`unranked`: of an output not even the number of dimensions is known. In the signature it looks like a scalar."""
        self.path = path
        self.settings = settings
        self.signature = signature
        self.warm_up = tuple(map(tuple, warm_up))
        """Sets of input shapes to run before an executor is bound."""
        self.left_out = tuple(left_out)
        """A line for each of the file's outputs that is not in the signature."""
        self.unranked = unranked
        self._model = model
        self._session_bytes: int | None = None
        self._warned = False
        self.endless = False
        """Whether a warm-up was stopped: none is begun again."""

    def __repr__(self) -> str:
        return f"<OnnxEngine {self.path.name} {self.signature!r}>"

    def bind(self, partition: Partition) -> "OnnxExecutor":
        if not isinstance(partition, CpuPartition):
            raise ModelRefused(f"{self.path}: ONNX Runtime serves partitions of CPU cores, not {partition!r}")
        before = heap_bytes()
        session = partition.run_with_helpers(lambda: self._session(partition.size))
        executor = OnnxExecutor(self, session, partition)
        self._warm_up(executor)
        self._measure(heap_bytes() - before)
        return executor

    @property
    def memory(self) -> Mapping[str, int]:
        return {"file": self._model.nbytes}

    @property
    def executor_memory(self) -> Mapping[str, int]:
        """By how much the process's heap grew while a session was made and warmed up, the least of all times, as other threads
        may allocate meanwhile; at least the file's size. A request that is larger than all of the warm-up takes more.
        """
        return {"session": max(self._model.nbytes, self._session_bytes or 0)}

    @property
    def most(self) -> int | None:
        """Bytes that outputs may have, where the data decides how large they are; None: no limit."""
        return self.settings.memory_limit if self.unranked or is_unsized(self.signature) else None

    def _session(self, cores: int) -> ort.InferenceSession:
        options = session_options(self.settings, cores)
        if self.most is None:
            return open_session(self._model, self.path, options)
        with limited(options, 2 * self.most + weights_beside(self.path)):
            return open_session(self._model, self.path, options)

    def _measure(self, grown: int) -> None:
        self._session_bytes = grown if self._session_bytes is None else min(self._session_bytes, grown)

    def close(self) -> None:
        """Free the copy of the file; executors do not need it."""
        self._model.close()

    def blank(self, shapes: Sequence[Shape], value: int = 0) -> list[Tensor]:
        """Inputs of these shapes filled with zeros, or another value."""
        return [blank(spec, shape, value) for spec, shape in zip(self.signature.inputs, shapes, strict=True)]

    @property
    def warmed(self) -> list[tuple[Shape, ...]]:
        """The shapes that executors have run before they are used; none if the model refused them."""
        return [] if self._warned else list(self.warm_up)

    def _warm_up(self, executor: "OnnxExecutor") -> None:
        """A model may refuse these shapes and values, or never end for them, so a failure is only logged."""
        shapes: tuple[Shape, ...] = ()
        limit = self.settings.trial_limit
        try:
            for shapes in () if self.endless else self.warm_up:
                if not _nbytes(wait_within(executor.enqueue(self.blank(shapes)), limit)):
                    wait_within(executor.enqueue(self.blank(shapes, 1)), limit)  # A session never frees its first allocation.
        except (ExecutionFailed, Cancelled) as error:
            self.endless = isinstance(error, Cancelled)
            if self._warned:  # Once for all partitions.
                return
            self._warned = True
            log.warning("%s: %s", self.path, warm_up_failed(self.signature.inputs, shapes, error))


class Binding(NamedTuple):
    """The tensors of a run: the library's object, what `Runner` takes for it, and the memory chosen for each output, None where
    there is none.
    """

    binding: ort.IOBinding
    handle: Any
    placed: list[Tensor | None]


class VerifiedBinding(NamedTuple):
    """A binding of which a run has shown that all outputs are written to the memory chosen for them."""

    binding: ort.IOBinding
    handle: Any
    outputs: tuple[Tensor, ...]
    large: bool


Key = tuple[object, ...]
"""The room, and each input's shape, address and size, None for an object that is not a tensor."""

Sizes = tuple[object, ...]
"""Each input's shape and bytes, None for an object that is not a tensor."""

MAX_MEMO_ENTRIES = 64

LARGE = 16 << 20
"""An inference with at least this many bytes of inputs and outputs makes the session take memory that is worth freeing."""


class OnnxExecutor:
    """A session on a partition's cores; see `engines.base.Executor` for the contract."""

    __deletable__ = ("_runner", "_session", "_verified")  # For mypyc.

    def __init__(self, engine: OnnxEngine, session: ort.InferenceSession, partition: CpuPartition) -> None:
        self.engine = engine
        self._session = session
        self._runner = Runner(session)
        self._stream = partition.stream
        self._size = partition.size
        self._signature = engine.signature
        self._checked: Memo[Sizes, None] = Memo(MAX_MEMO_ENTRIES)
        self._verified: Memo[Key, VerifiedBinding] = Memo(MAX_MEMO_ENTRIES)
        self._has_strings = any(spec.datatype.kind == "bytes" for spec in (*self._signature.inputs, *self._signature.outputs))
        self._outputs = Outputs(engine.signature)
        if engine.unranked:
            self._outputs.distrust()
        self._runs = 0
        self._large = math.inf
        self._most = engine.most
        self._keeps = engine.settings.memory_arena
        self._shrinks = not self._keeps and self._most is not None  # The limit needs an arena.
        self._alternate = False
        self._closed = False

    def __repr__(self) -> str:
        runs = f"{self._runs} run{'s' * (self._runs != 1)}"
        return f"<OnnxExecutor {self.engine.path.name}, {runs}{', closed' if self._closed else ''}>"

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> "OnnxWork":
        if self._closed:
            raise ExecutionFailed(f"{self!r} takes nothing more; bind the engine again")
        key = _key(inputs, room)
        if key not in self._verified and _sizes(inputs) not in self._checked:
            self._check(inputs)
        return OnnxWork(self._stream, inputs, room, key, self._run)

    def rebind(self, partition: Partition) -> "OnnxExecutor":
        """A new session, with its threads on the new partition's cores."""
        return self.engine.bind(partition)

    def alternate(self, partition: Partition) -> "OnnxExecutor":
        """A new session, as for `rebind`. It has weights of its own: the library's bindings for Python share no packed ones."""
        executor = self.engine.bind(partition)
        executor._alternate = True
        return executor

    @contextmanager
    def overriding(self, **changes: Any) -> Iterator[None]:
        """See `Executor.overriding`; none of these settings has an effect here."""
        if overridden(RuntimeSettings(), changes).graphs == "required":
            raise ModelRefused(
                f"{self.engine.path}: graphs are required, but ONNX Runtime on a CPU has none; leave graphs 'on'"
            )
        yield

    def describe(self) -> Mapping[str, object]:
        """No graphs, the threads within an operator and of operators in parallel, and the outputs that are left out."""
        warm = [[list(shape) for shape in shapes] for shapes in self.engine.warmed]
        within, parallel_operators = self.engine.settings.threads(self._size)
        parallel = {"parallel": parallel_operators} if self.engine.settings.execution_mode == "parallel" else {}
        adds = {"adds": dict(self.memory)} if self._alternate else {}
        notes = {"notes": list(self.engine.left_out)} if self.engine.left_out else {}
        return {"graphs": "none", "threads": within, **parallel, "shapes": warm, **adds, **notes}

    def trim(self, after: float, idle: bool) -> None:
        """See `Trimming.trim`. The session frees memory at the end of the next run, or of a run with zeros if it is idle.

        The memory is kept for a while because allocating much memory takes three times as long as using it again.
        """
        if time.monotonic() - self._large < after or not self.engine.settings.memory_arena:
            return
        self._large, self._shrinks = math.inf, True
        if idle and not self._closed and not self.engine.endless:
            candidates = [self.engine.blank(shapes) for shapes in self.engine.warm_up]
            with suppress(ExecutionFailed):  # A model may refuse zeros; the memory is freed nevertheless.
                smallest = min(candidates, key=_nbytes)
                OnnxWork(self._stream, smallest, NO_ROOM, _key(smallest, NO_ROOM), self._run).wait()
            self._large = math.inf

    @property
    def memory(self) -> Mapping[str, int]:
        return {} if self._closed else self.engine.executor_memory

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            del self._verified, self._runner, self._session

    def _check(self, inputs: Sequence[Tensor]) -> None:
        """Sizes that pass are remembered: the same few come again and again, and a lookup takes half the time of a check."""
        check_tensors(self._signature, inputs)
        shapes = [tensor.shape for tensor in inputs]
        if -1 in self._signature.check(shapes).values():
            self._check_largest(shapes)
        self._checked.remember(_sizes(inputs), None)

    def _check_largest(self, shapes: Sequence[Shape]) -> None:
        """Refuse sizes that differ for one name if outputs of the largest would be above the limit: inputs may be broadcast to
        them, and of these outputs the session's memory is not limited. Raises TensorMismatch.
        """
        sizes: dict[str, int] = {}
        for spec, shape in zip(self._signature.inputs, shapes, strict=True):
            for dim, size in zip(spec.dims, shape, strict=True):
                if isinstance(dim, str):
                    sizes[dim] = max(size, sizes.get(dim, 0))
        limit = self.engine.settings.memory_limit
        if limit is not None and (nbytes := self._signature.output_bytes(sizes)) > limit:
            why = f"{self._signature.disagreement(shapes)}; of the larger sizes the outputs may have {nbytes} bytes"
            raise TensorMismatch(f"{why}, and the limit is {limit} (memory_limit)")

    def _run(self, inputs: Sequence[Tensor], room: Room, key: Key, options: ort.RunOptions) -> tuple[Tensor, ...]:
        self._runs += 1
        if self._shrinks:
            self._shrinks = not self._keeps
            options.add_run_config_entry(*SHRINK)
        if self._most is not None:
            return self._run_limited(inputs, room, key, options, self._most)
        return self._run_session(inputs, room, key, options)

    def _run_limited(
        self, inputs: Sequence[Tensor], room: Room, key: Key, options: ort.RunOptions, most: int
    ) -> tuple[Tensor, ...]:
        """Run where the data decides how large the outputs are. Raises OutputsTooLarge, with the memory freed.

        What earlier runs left in the arena may be in the way, in pieces that are too small: then the run is made again.
        """
        for again in (True, False):
            try:
                outputs = self._run_session(inputs, room, key, options)
            except RuntimeError as error:
                if (found := refused(error)) is None:
                    raise
                asked, left = found
                self._shrink()
                if again and asked <= 2 * most:
                    continue
                raise OutputsTooLarge(asked if asked > most else 2 * most - left + asked, most) from None
            break
        if (nbytes := _nbytes(outputs)) > most:
            del outputs
            self._shrink()
            raise OutputsTooLarge(nbytes, most)
        return outputs

    def _shrink(self) -> None:
        """Free what the session keeps for later runs: a run that is stopped before it begins does that too."""
        options = ort.RunOptions()
        options.add_run_config_entry(*SHRINK)
        options.terminate = True
        inputs = min([self.engine.blank(shapes) for shapes in self.engine.warm_up], key=_nbytes)
        with suppress(RuntimeError):
            bound = self._bind(inputs, NO_ROOM)
            self._runner.run(bound.handle, options)

    def _run_session(self, inputs: Sequence[Tensor], room: Room, key: Key, options: ort.RunOptions) -> tuple[Tensor, ...]:
        if self._has_strings and self._are_few(inputs):
            with suppress(UnicodeDecodeError):  # Bytes that are not UTF-8 take the other path.
                return self._run_values(inputs, options)
        verified = self._verified.get(key)
        bound = verified or self._bind(inputs, room)
        try:
            self._runner.run(bound.handle, options)
        except RuntimeError as error:
            if not is_wrong_shape(error):
                raise
            self._outputs.distrust()  # The file declares wrong shapes, so do not rely on them any more.
            self._verified.clear()
            bound = self._bind(inputs, room)
            self._runner.run(bound.handle, options)
        if not isinstance(bound, VerifiedBinding):
            return self._collect(key, inputs, bound)
        if bound.large:
            self._large = time.monotonic()
        return bound.outputs

    def _bind(self, inputs: Sequence[Tensor], room: Room) -> Binding:
        """Bind the tensors to the session."""
        binding = self._session.io_binding()
        outputs: list[Tensor | None] = []
        for spec, tensor in zip(self._signature.inputs, inputs, strict=True):
            if spec.datatype.size:
                binding.bind_input(spec.name, "cpu", 0, _NUMBERS[spec.datatype.name], tensor.shape, tensor.address)
            else:
                binding.bind_ortvalue_input(spec.name, to_value(tensor.address, tensor.nbytes, tensor.shape))
        places = self._outputs.placements([tensor.shape for tensor in inputs], room)
        for spec, place in zip(self._signature.outputs, places, strict=True):
            if place is None:
                binding.bind_output(spec.name, "cpu")
                outputs.append(None)
            else:
                address, number = room.address + place.offset, _NUMBERS[spec.datatype.name]
                binding.bind_output(spec.name, "cpu", 0, number, place.shape, address)
                outputs.append(Tensor(place.shape, address, place.nbytes))
        return Binding(binding, self._runner.handle_of(binding), outputs)

    def _collect(self, key: Key, inputs: Sequence[Tensor], bound: Binding) -> tuple[Tensor, ...]:
        """The outputs of a binding's first run, which may be elsewhere than in the memory chosen for them.

        The session does not write an output that is one of the inputs: it returns the input. Slots are used again and again,
        so a binding is kept if everything was written to the memory chosen.
        """
        values, given = bound.binding.get_outputs(), {tensor.address for tensor in inputs}
        if not self._has_strings and [value.data_ptr() for value in values] == [
            tensor and tensor.address for tensor in bound.placed
        ]:
            outputs = tuple([tensor for tensor in bound.placed if tensor])
            large = _nbytes((*inputs, *outputs)) >= LARGE
            self._verified.remember(key, VerifiedBinding(bound.binding, bound.handle, outputs, large))
        else:
            found = zip(self._signature.outputs, values, bound.placed, strict=True)
            outputs = tuple([to_tensor(spec, value, placed, given) for spec, value, placed in found])
        if _nbytes((*inputs, *outputs)) >= LARGE:
            self._large = time.monotonic()
        return outputs

    def _are_few(self, inputs: Sequence[Tensor]) -> bool:
        """Whether inputs and outputs are known to be small, so that they may be converted with the GIL held."""
        texts = [tensor for spec, tensor in zip(self._signature.inputs, inputs, strict=True) if not spec.datatype.size]
        if sum(tensor.nbytes for tensor in texts) > SMALL or sum(math.prod(tensor.shape) for tensor in texts) > FEW:
            return False
        return self._outputs.are_few([tensor.shape for tensor in inputs])

    def _run_values(self, inputs: Sequence[Tensor], options: ort.RunOptions) -> tuple[Tensor, ...]:
        """Run with arrays instead of memory, which takes a tenth of the time for few strings. Raises UnicodeDecodeError."""
        values = {spec.name: to_array(spec, tensor) for spec, tensor in zip(self._signature.inputs, inputs, strict=True)}
        names = [spec.name for spec in self._signature.outputs]
        return tuple([of_array(array) for array in self._session.run(names, values, options)])


def load_onnx(path: Path, settings: RuntimeSettings = DEFAULTS) -> OnnxEngine:
    """Read an ONNX file and its signature. Blocks. Raises ModelRefused with the library's error.

    Of the settings those of ONNX Runtime have an effect, and `warm_up` and `usual_shapes`: memory is allocated for each shape
    that is run.
    """
    try:
        model = copy_model(path)
    except OSError as error:
        raise ModelRefused(f"{path}: {error.strerror}") from error
    options = session_options(DEFAULTS, 1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = open_session(model, path, options)
    weights = [value for value in session.get_overridable_initializers() if value.name in settings.optional_inputs]
    for value in (*session.get_inputs(), *weights):
        if _datatype(value) is None:
            raise ModelRefused(f"{path}: input {value.name!r} has type {value.type}, which requests cannot have; {_fed(value)}")
    inputs = [_spec(value) for value in session.get_inputs()]
    for spec in [_spec(value) for value in weights]:
        inputs.append(with_default(spec, _NUMBERS[spec.datatype.name], model.view(), path))
    outputs = tuple(dict.fromkeys(_spec(value) for value in session.get_outputs() if _datatype(value)))
    left_out = [_left_out(value) for value in session.get_outputs() if not _datatype(value)]
    if left_out and not outputs:
        raise ModelRefused(f"{path}: it has no output that can be served: {left_out[0]}")
    if not outputs:
        raise ModelRefused(f"{path}: it has no output, so there is nothing to answer with; export it with the outputs to have")
    types = {spec.datatype.name for spec in (*inputs, *outputs)}
    if {"BYTES", "BF16"} <= types:
        raise ModelRefused(f"{path}: ONNX Runtime cannot serve BYTES and BF16 tensors in one model")
    signature = Signature(tuple(inputs), outputs)
    scalars = {spec.name for spec in outputs if not spec.dims}
    unranked = bool(scalars and scalars & unranked_outputs(model.view()))
    try:
        return OnnxEngine(path, model, signature, _shapes_to_warm(signature, settings), settings, left_out, unranked)
    except ModelRefused as error:
        raise ModelRefused(f"{path}: {error}") from error


def _datatype(value: Any) -> str | None:
    """The protocol's name of a tensor's data type; None for a type that it does not have, or what is no tensor."""
    return _TYPES.get(value.type.removeprefix("tensor(").removesuffix(")"), (None,))[0]


def _spec(value: Any) -> TensorSpec:
    return TensorSpec(value.name, DATATYPES[_TYPES[value.type[7:-1]][0]], tuple(_dimension(dim) for dim in value.shape))


def _left_out(value: Any) -> str:
    """That an output is not served, and what to do to have it."""
    how = {
        "seq(map(": 'export the classifier with options={"zipmap": False} to have it as a tensor',
        "map(": "let the model give keys and values as tensors to have it",
        "seq(": "let the model end with SequenceAt or ConcatFromSequence to have it as a tensor",
        "optional(": "let the model end with OptionalGetElement to have it",
    }
    cure = next((each for kind, each in how.items() if value.type.startswith(kind)), "let the model end with Cast to have it")
    return f"output {value.name!r} is left out, as answers cannot have its type, {value.type}; {cure}"


def _fed(value: Any) -> str:
    """What to do about an input that no request can have."""
    how = {
        "map(": "export the model without its DictVectorizer, with the columns as inputs",
        "seq(": "let the model take tensors, and make the sequence of them with SequenceConstruct",
        "optional(": "make it a plain input, with an initializer of its name as the value of requests without it",
    }
    return next((each for kind, each in how.items() if value.type.startswith(kind)), "let the model begin with Cast")


def _dimension(dim: object) -> int | str:
    return dim if isinstance(dim, int) and dim >= 0 else dimension_name(dim) if isinstance(dim, str) else ""


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])


def _key(inputs: Sequence[Tensor], room: Room) -> Key:
    return (room, *[tensor[:3] if type(tensor) is Tensor else None for tensor in inputs])


def _sizes(inputs: Sequence[Tensor]) -> Sizes:
    return tuple([tensor[:3:2] if type(tensor) is Tensor else None for tensor in inputs])


def _shapes_to_warm(signature: Signature, settings: RuntimeSettings) -> list[tuple[Shape, ...]]:
    """Those that the settings name, else the usual ones. Raises ModelRefused."""
    usual = usual_shapes(settings, signature.inputs)
    return [usual] if isinstance(settings.warm_up, str) else shape_sets(settings.warm_up, signature, usual)
