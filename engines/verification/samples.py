"""Random inputs to try an engine with: the server's own, never a client's. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ModelRefused
from ..signature import Shape, TensorSpec
from .rule import encoded

Array = np.ndarray[Any, np.dtype[Any]]

ATTEMPTS = 2
"""Ways to draw inputs, the better one first: the next is for models that refuse the one before."""

_MOST, _BELOW = 256, 1 - 2.0**-8
"""FP16 and BF16 round no float up to the whole number above that is drawn below the first of these, times the second."""


def draw(
    specs: Sequence[TensorSpec], shapes: Sequence[Shape], bounds: Mapping[str, int], seed: int = 0, attempt: int = 0
) -> list[Array]:
    """An array for each input, the same for the same arguments.

    First: normally distributed floats, or floats from 0 to below the bound of their input (the rows of the table that they
    index), and integers below that, or below 2 where none is known. Then: floats from 0 to 1, and integers below 2. Masks are
    ones: with none of its elements seen, a softmax has no answer. Raises ModelRefused for BYTES, of which any text may be a
    wrong one.
    """
    random = np.random.default_rng((seed, attempt))
    return [_draw(spec, shape, bounds.get(spec.name, 0), random, attempt) for spec, shape in zip(specs, shapes, strict=True)]


def _draw(spec: TensorSpec, shape: Shape, bound: int, random: np.random.Generator, attempt: int) -> Array:
    kind, dtype = spec.datatype.kind, spec.datatype.numpy
    if kind == "bytes":
        raise ModelRefused(f"input {spec.name!r} is BYTES, for which no inputs can be drawn")
    if kind == "float":
        if attempt or bound:
            below = 1.0 if attempt else min(bound, _MOST) * _BELOW
            return encoded(spec.datatype, np.asarray(random.random(shape, np.float32) * np.float32(below)))
        return encoded(spec.datatype, np.asarray(random.standard_normal(shape, np.float32)))
    if "mask" in spec.name.lower():
        return np.ones(shape, dtype)
    least = 256 if spec.datatype.name == "UINT8" and not attempt else 2
    return np.asarray(random.integers(0, bound if bound and not attempt else least, shape)).astype(dtype)


def harmless(specs: Sequence[TensorSpec], shapes: Sequence[Shape]) -> list[Array]:
    """Inputs for an engine of which nothing is known: integers are 0, as a GPU does not check whether an index is too large."""
    drawn = draw(specs, shapes, {}, attempt=1)
    return [
        each if spec.datatype.kind == "float" or "mask" in spec.name.lower() else np.zeros_like(each)
        for spec, each in zip(specs, drawn, strict=True)
    ]


def rounded(specs: Sequence[TensorSpec], inputs: Sequence[Array], seed: int = 0) -> list[Array]:
    """The inputs with each FP32 changed by as much as rounding to TF32 changes it at most, in a random direction."""
    random = np.random.default_rng((seed, ATTEMPTS))
    return [
        np.asarray(each * (1 + 2.0**-11 * random.uniform(-1, 1, each.shape))).astype(each.dtype)
        if spec.datatype.name in ("FP16", "FP32", "FP64")
        else each
        for spec, each in zip(specs, inputs, strict=True)
    ]
