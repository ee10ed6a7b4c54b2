"""The shapes to run before an executor is bound, where `RuntimeSettings.warm_up` names them. Pure."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .base import Tensor
from .errors import ModelRefused, TensorMismatch
from .settings import RuntimeSettings, Sample
from .signature import Shape, Signature, TensorSpec, dims_text


def shape_sets(warm_up: Sequence[Sample], signature: Signature, usual: Sequence[Shape]) -> list[tuple[Shape, ...]]:
    """A set of shapes, one for each input in order, for every sample; duplicates are left out.

    `usual` are the shapes for inputs and dimensions that a sample does not name. Raises ModelRefused for a batch size where no
    input has a dynamic first dimension, for an unknown input, and for shapes that the model does not take.
    """
    sets = list(dict.fromkeys(_shapes(sample, signature.inputs, usual) for sample in warm_up))
    for shapes in sets:
        try:
            signature.check(shapes)
        except TensorMismatch as error:
            raise ModelRefused(f"warm_up: {error}") from error
    return sets


def usual_shapes(settings: RuntimeSettings, inputs: Sequence[TensorSpec]) -> tuple[Shape, ...]:
    """A shape for each input: what the model has, else what `settings.usual_shapes` has, else 1.

    A dimension without a size has one that its name has elsewhere. A shape with another number of dimensions than the model's
    is ignored.
    """
    known = dict(settings.usual_shapes)
    free = [(-1,) * len(spec.dims) for spec in inputs]
    stated = [known.get(spec.name, none) for spec, none in zip(inputs, free, strict=True)]
    stated = [shape if len(shape) == len(none) else none for shape, none in zip(stated, free, strict=True)]
    sizes: dict[str, int] = {}
    for spec, shape in zip(inputs, stated, strict=True):
        for dim, size in zip(spec.dims, shape, strict=True):
            if isinstance(dim, str) and dim and size >= 0:
                sizes.setdefault(dim, size)
    return tuple(
        tuple(_usual(dim, size, sizes) for dim, size in zip(spec.dims, shape, strict=True))
        for spec, shape in zip(inputs, stated, strict=True)
    )


def warm_up_failed(inputs: Sequence[TensorSpec], shapes: Sequence[Shape], error: Exception) -> str:
    """For the log: that a model refuses zeros of these shapes, and how to name others."""
    given = ", ".join(f"{spec.name} {list(shape)}" for spec, shape in zip(inputs, shapes, strict=True))
    spec = next((spec for spec in inputs if any(isinstance(dim, str) for dim in spec.dims[1:])), None)
    text = f"warm-up with zeros ({given}) failed, so the first request pays for it: {error}"
    if spec is None:
        return text
    value = f"data_type: {spec.datatype.config_name} dims: [...] zero_data: true"
    sample = f'model_warmup {{ name: "usual" inputs {{ key: "{spec.name}" value {{ {value} }} }} }}'
    return f"{text}; have config.pbtxt name sizes that it takes, as in {sample}"


def _usual(dim: int | str, size: int, sizes: Mapping[str, int]) -> int:
    return dim if isinstance(dim, int) else size if size >= 0 else sizes.get(dim, 1)


def _shapes(sample: Sample, inputs: Sequence[TensorSpec], usual: Sequence[Shape]) -> tuple[Shape, ...]:
    if isinstance(sample, int):
        return _of_rows(sample, inputs, usual)
    asked, known = dict(sample), [spec.name for spec in inputs]
    if unknown := [name for name in asked if name not in known]:
        raise ModelRefused(f"warm_up: the model has no input {unknown[0]!r}; it has {', '.join(map(repr, known)) or 'none'}")
    return tuple(asked.get(spec.name, shape) for spec, shape in zip(inputs, usual, strict=True))


def _of_rows(rows: int, inputs: Sequence[TensorSpec], usual: Sequence[Shape]) -> tuple[Shape, ...]:
    """The usual shapes with so many rows in every input whose first dimension is dynamic."""
    dynamic = [bool(spec.dims) and isinstance(spec.dims[0], str) for spec in inputs]
    if not any(dynamic):
        there = ", ".join(f"{spec.name} {dims_text(spec.dims)}" for spec in inputs) or "none"
        raise ModelRefused(f"warm_up: a batch of {rows}, but no input has a first dimension that varies; there is {there}")
    return tuple((rows, *shape[1:]) if varies else shape for varies, shape in zip(dynamic, usual, strict=True))


def blank(spec: TensorSpec, shape: Shape, value: int = 0) -> Tensor:
    """A tensor filled with zeros, with another value, or with empty strings, which in wire form are four zero bytes each."""
    count = math.prod(shape)
    array = np.full(count, value, spec.datatype.numpy) if spec.datatype.size else np.zeros(count, np.uint32)
    return Tensor(shape, array.ctypes.data, array.nbytes, array)
