"""Checks tensors against a model's signature: names, data types, ranks, dynamic dimensions and the largest batch. Pure."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .datatypes import DataType
from .errors import ModelRefused, TensorMismatch

Shape = tuple[int, ...]

ALIGNMENT = 64
"""Bytes at which tensors start inside shared host memory: a cache line, and what ONNX Runtime's own allocator uses."""


def align(offset: int) -> int:
    """The next multiple of ALIGNMENT at or above `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


_PLACEHOLDERS = frozenset(("none", "null", "nan", "n/a", "unknown", "unk", "undefined", "dynamic", "any"))


def dimension_name(written: str) -> str:
    """The name of a dynamic dimension as a model file has it; "" for what exporters write for a dimension without a name.

    They write it for several dimensions, which have different sizes: `?`, `-1`, `None` and the like.
    """
    name = written.strip()
    return name if name.lower() not in _PLACEHOLDERS and any(map(str.isalpha, name)) else ""


def dims_text(dims: Sequence[int | str]) -> str:
    """Dimensions as text: `[batch, 3, ?]`."""
    return "[" + ", ".join(str(dim) if dim != "" else "?" for dim in dims) + "]"


class Form(NamedTuple):
    """Two shapes with as many elements: `outer`, as callers see a tensor, and `inner`, as the model does.

    Sizes that vary are -1: the n-th in `outer` is the n-th in `inner`.
    """

    outer: Shape
    inner: Shape

    def obstacle(self) -> str | None:
        """Why one shape cannot be converted to the other while sizes are unknown; None if it can."""
        outer, inner = _runs(self.outer), _runs(self.inner)
        if len(outer) != len(inner):
            return f"{len(outer) - 1} sizes that vary in {list(self.outer)}, but {len(inner) - 1} in {list(self.inner)}"
        if outer != inner:
            return f"{list(self.outer)} and {list(self.inner)} have different numbers of elements"
        return None

    def inward(self, shape: Shape) -> Shape | None:
        """The model's shape for a caller's; None if that does not match `outer`."""
        return _change(shape, self.outer, self.inner)

    def outward(self, shape: Shape) -> Shape | None:
        """The caller's shape for the model's; None if that does not match `inner`."""
        return _change(shape, self.inner, self.outer)


class Default(NamedTuple):
    """The model's value for an input that a request leaves out: its shape in the model, and its bytes in wire form."""

    shape: Shape
    data: bytes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    `dims` are sizes, or names of dynamic dimensions: outputs have the sizes that inputs have by these names, and the empty name
    is for a size that is known by no other. They include the batch dimension. `limits` are the minimum and maximum of each
    dimension, if the engine was built for ranges. With a `form` callers see the tensor in another shape; `dims` and `limits`
    are the model's. An executor needs every input, so a caller that has none for one with a `default` passes that.
    """

    name: str
    datatype: DataType
    dims: tuple[int | str, ...]
    limits: tuple[tuple[int, int], ...] = ()
    form: Form | None = None
    default: Default | None = None

    @property
    def shape(self) -> Shape:
        """The dimensions as the protocol shows them: -1 for dynamic ones."""
        if self.form:
            return self.form.outer
        return tuple(dim if isinstance(dim, int) else -1 for dim in self.dims)

    def resolve(self, sizes: Mapping[str, int]) -> Shape | None:
        """The shape once named dimensions have these sizes; None while some are unknown."""
        shape = tuple(dim if isinstance(dim, int) else sizes.get(dim, -1) for dim in self.dims)
        return None if -1 in shape else shape

    def inward(self, shape: Shape) -> Shape:
        """The model's shape for a caller's. Raises TensorMismatch for one that cannot be converted."""
        inner = self.form.inward(shape) if self.form else shape
        if inner is None:
            raise TensorMismatch(f"input {self.name!r}: shape {list(shape)}; expected one as in {list(self.shape)}")
        return inner

    def nbytes(self, shape: Shape) -> int:
        """The size in wire form of a tensor of this shape, in bytes; 0 for BYTES, whose size depends on the elements."""
        return math.prod(shape) * self.datatype.size


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model. `max_batch` is 0 if the first dimension is not a batch.

    `in_parts`: the model answers in parts, each with all outputs; see `engines.base.Streaming`. `same_sizes`: the library
    refuses inputs in which dimensions of one name have different sizes, as TensorRT does; ONNX Runtime takes them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int = 0
    in_parts: bool = False
    same_sizes: bool = False

    def __repr__(self) -> str:
        inputs, outputs = (_list(specs) for specs in (self.inputs, self.outputs))
        return f"<Signature {inputs} -> {outputs}, batch {self.max_batch or 'none'}>"

    def with_max_batch(self, max_batch: int) -> "Signature":
        """The same with batches of up to `max_batch` rows. Raises ModelRefused if a tensor has no dynamic first dimension."""
        for spec in (*self.inputs, *self.outputs) if max_batch else ():
            if not spec.dims or isinstance(spec.dims[0], int):
                raise ModelRefused(
                    f"max_batch {max_batch} needs first dimensions that vary, but {spec.name!r} has shape {list(spec.shape)}; "
                    "export it with one, or set 0"
                )
        return replace(self, max_batch=max_batch)

    def check(self, shapes: Sequence[Shape]) -> dict[str, int]:
        """Check one shape for each input, in order, and return the sizes of the named dimensions: -1 for a name with several,
        which says nothing of the outputs.

        Raises TensorMismatch naming the input, what came and what was expected.
        """
        if len(shapes) != len(self.inputs):
            raise self.miscounted(len(shapes), "shape")
        sizes: dict[str, int] = {}
        for spec, shape in zip(self.inputs, shapes, strict=True):
            _check_shape(spec, shape)
            for dim, size in zip(spec.dims, shape, strict=True):
                if isinstance(dim, str) and dim and sizes.setdefault(dim, size) != size:
                    sizes[dim] = -1
        if self.same_sizes and (why := self.disagreement(shapes)):
            raise TensorMismatch(why)
        if self.max_batch:
            self._check_batch(shapes)
        return sizes

    def disagreement(self, shapes: Sequence[Shape]) -> str:
        """Which dimension has another size than one of the same name before it, for an error's text; "" if none has.

        `shapes` have passed `check`, or have at least as many dimensions as the inputs.
        """
        sizes: dict[str, int] = {}
        for spec, shape in zip(self.inputs, shapes, strict=True):
            for axis, (dim, size) in enumerate(zip(spec.dims, shape, strict=True)):
                if isinstance(dim, str) and dim and (other := sizes.setdefault(dim, size)) != size:
                    where = f"input {spec.name!r}: dimension {axis} of shape {list(shape)} is {size}"
                    return f"{where}; dimension {dim!r} is {other} elsewhere in the request"
        return ""

    @property
    def expected(self) -> str:
        """The inputs for an error's text: their number, and each."""
        return f"{len(self.inputs)}: {_list(self.inputs)}" if self.inputs else "none"

    def miscounted(self, count: int, noun: str) -> TensorMismatch:
        """The error for `count` tensors, shapes or the like (`noun`) that are not one for each input."""
        return TensorMismatch(f"{count} {noun}{'s' * (count != 1)} given, but the model's inputs are {self.expected}")

    def output_shapes(self, sizes: Mapping[str, int]) -> tuple[Shape | None, ...]:
        """The shape of each output, None if it is known only after the model ran."""
        return tuple(spec.resolve(sizes) for spec in self.outputs)

    def output_bytes(self, sizes: Mapping[str, int]) -> int:
        """The bytes that the outputs of known size take side by side, each rounded up to ALIGNMENT."""
        known = zip(self.outputs, self.output_shapes(sizes), strict=True)
        return sum(align(spec.nbytes(shape)) for spec, shape in known if shape is not None)

    def unasked(self, positions: Collection[int]) -> int:
        """The bits of `Room.unasked` if of the outputs those at these positions are wanted; there are bits for 63 outputs."""
        return sum(1 << index for index in range(min(len(self.outputs), 63)) if index not in positions)

    def rows(self, shapes: Sequence[Shape]) -> int:
        """The number of rows of a request with these shapes: its batch, or 1."""
        return shapes[0][0] if self.max_batch and shapes else 1

    def _check_batch(self, shapes: Sequence[Shape]) -> None:
        for spec, shape in zip(self.inputs, shapes, strict=True):
            if not 1 <= shape[0] <= self.max_batch:
                outer = spec.form.outward(shape) if spec.form else None
                expected = f"expected 1 to {self.max_batch}, the model's max_batch_size"
                raise TensorMismatch(f"input {spec.name!r}: batch of {shape[0]} in shape {list(outer or shape)}; {expected}")
            if shape[0] != shapes[0][0]:
                raise TensorMismatch(
                    f"input {spec.name!r}: batch of {shape[0]}, but input {self.inputs[0].name!r} has {shapes[0][0]}"
                )


def obstacle(signature: Signature) -> str | None:
    """Why the rows of a batch cannot be separated by their first dimensions; None if they can."""
    batches = {spec.dims[0] for spec in signature.inputs}
    for spec in (*signature.inputs, *signature.outputs):
        if shared := [dim for dim in spec.dims[1:] if dim in batches and dim]:
            return f"{spec.name!r} has the batch dimension {shared[0]!r} in another place too: {dims_text(spec.dims)}"
    for spec in signature.outputs:
        if spec.dims[0] and any(batches) and spec.dims[0] not in batches:
            return (
                f"output {spec.name!r} has {spec.dims[0]!r} for a first dimension, which no input has: {dims_text(spec.dims)}"
            )
    return None if signature.inputs else "it has no inputs"


def _check_shape(spec: TensorSpec, shape: Shape) -> None:
    if len(shape) != len(spec.dims):
        raise TensorMismatch(
            f"input {spec.name!r}: shape {list(shape)} has {len(shape)} dimension{'s' * (len(shape) != 1)}; "
            f"expected {len(spec.dims)}, as in {list(spec.shape)}"
        )
    for axis, (size, dim) in enumerate(zip(shape, spec.dims, strict=True)):
        if isinstance(dim, int) and size != dim:
            raise TensorMismatch(f"input {spec.name!r}: dimension {axis} of shape {list(shape)} is {size}; expected {dim}")
    for axis, (size, (least, most)) in enumerate(zip(shape, spec.limits, strict=False)):
        if not least <= size <= most:
            raise TensorMismatch(
                f"input {spec.name!r}: dimension {axis} of shape {list(shape)} is {size}; "
                f"the engine was built for {least} to {most}"
            )


def _change(shape: Shape, given: Shape, wanted: Shape) -> Shape | None:
    if len(shape) != len(given) or any(size != dim for size, dim in zip(shape, given, strict=True) if dim >= 0):
        return None
    sizes = iter([size for size, dim in zip(shape, given, strict=True) if dim < 0])
    return tuple([dim if dim >= 0 else next(sizes) for dim in wanted])


def _runs(shape: Shape) -> list[int]:
    """The number of elements in each run of known sizes: before, between and after those that vary."""
    runs = [1]
    for size in shape:
        if size < 0:
            runs.append(1)
        else:
            runs[-1] *= size
    return runs


def _list(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.datatype}{list(spec.shape)}" for spec in specs)
