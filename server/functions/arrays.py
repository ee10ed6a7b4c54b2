"""Tensors of a slot as numpy arrays of a function's own, and what a function returned as tensors. Pure."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from engines import Signature, TensorSpec, wire
from engines.signature import dims_text

from ..errors import Failed

Arrays = dict[str, Any]
"""Arrays by the names of tensors. Those of BYTES have elements of type `bytes`; those of BF16 are its 16 bits, as uint16."""


class Data(NamedTuple):
    """A tensor: its shape in the model, and its bytes in wire form, as a contiguous array or bytes."""

    shape: tuple[int, ...]
    data: Any


class Raw(NamedTuple):
    """A copy of a tensor's bytes; `array` makes an array of it, which for BYTES takes a while."""

    spec: TensorSpec
    shape: tuple[int, ...]
    data: bytearray

    def array(self) -> Any:
        outer = self.spec.form.outward(self.shape) if self.spec.form else None
        shape = self.shape if outer is None else outer
        if self.spec.datatype.size:
            return np.frombuffer(self.data, self.spec.datatype.numpy).reshape(shape)
        found = np.empty(math.prod(shape), object)
        found[:] = wire.unpack(memoryview(self.data), found.size)
        return found.reshape(shape)


def copied(specs: Sequence[TensorSpec], places: Sequence[tuple[tuple[int, ...], int, int]], view: memoryview) -> list[Raw]:
    """Copies of tensors, which are at these places in `view`: shape, offset and size in bytes."""
    return [
        Raw(spec, shape, bytearray(view[offset : offset + nbytes]))
        for spec, (shape, offset, nbytes) in zip(specs, places, strict=True)
    ]


def arrays(tensors: Sequence[Raw]) -> Arrays:
    """The arrays that a function gets."""
    return {raw.spec.name: raw.array() for raw in tensors}


def checked(what: str, returned: Any, specs: Sequence[TensorSpec]) -> list[Data]:
    """What a function returned, a tensor for each of these. Raises Failed, which names what is wrong.

    A tensor that has a default may be missing. `what` names the function.
    """
    if not isinstance(returned, dict):
        raise Failed(f"{what} returned {type(returned).__name__}; expected a dict of arrays by name")
    names = [spec.name for spec in specs]
    if unknown := [name for name in returned if name not in names]:
        raise Failed(f"{what} returned {unknown[0]!r}; expected {', '.join(map(repr, names))}")
    found = []
    for spec in specs:
        if spec.name in returned:
            found.append(_tensor(what, spec, returned[spec.name]))
        elif spec.default is not None:
            found.append(Data(spec.default.shape, spec.default.data))
        else:
            raise Failed(f"{what} returned no {spec.name!r}; expected {', '.join(map(repr, names))}")
    return found


def check_shapes(what: str, signature: Signature, tensors: Sequence[Data]) -> None:
    """Check that the outputs fit the signature that clients know: sizes that are fixed. Raises Failed."""
    for spec, (shape, _) in zip(signature.outputs, tensors, strict=True):
        if any(isinstance(dim, int) and dim != size for dim, size in zip(spec.dims, shape, strict=True)):
            raise Failed(f"{what} returned {spec.name!r} of shape {list(shape)}; expected {dims_text(spec.dims)}")


def _tensor(what: str, spec: TensorSpec, value: Any) -> Data:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:  # Such as rows of different lengths.
        raise Failed(f"{what} returned {spec.name!r} as a {type(value).__name__} that is no array: {error}") from error
    expected = f"expected {spec.datatype}{list(spec.shape)}, as an array of {_numpy(spec)}"
    texts = not spec.datatype.size
    if array.dtype.kind not in "OSU" if texts else array.dtype != spec.datatype.numpy:
        raise Failed(f"{what} returned {spec.name!r} as an array of {array.dtype}; {expected}")
    shape = spec.form.inward(array.shape) if spec.form else array.shape
    if shape is None or len(shape) != len(spec.dims):
        raise Failed(f"{what} returned {spec.name!r} of shape {list(array.shape)}; {expected}")
    # A copy, as the function may keep its array, and the next call may write to it before this one is used.
    return Data(shape, _pack(what, spec, array) if texts else np.atleast_1d(array.copy()))


def _pack(what: str, spec: TensorSpec, array: Any) -> bytes:
    elements = []
    for element in array.reshape(-1).tolist():
        if isinstance(element, str):
            try:
                element = element.encode()
            except UnicodeEncodeError as error:
                raise Failed(f"{what} returned {spec.name!r} with an element that is no UTF-8: {error}") from error
        if not isinstance(element, bytes):
            kind = type(element).__name__
            raise Failed(f"{what} returned {spec.name!r} with an element of type {kind}; expected bytes or str")
        elements.append(element)
    return wire.pack(elements)


def _numpy(spec: TensorSpec) -> str:
    return str(spec.datatype.numpy) if spec.datatype.size else "bytes or str"
