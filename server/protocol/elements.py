"""JSON tensor data into typed elements: nested or flat, and never a value that the data type cannot hold."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from engines import DataType, wire
from server.errors import BadRequest

from .document import kind_of, show

Array = np.ndarray[Any, np.dtype[Any]]

_FITS = {"float": "iuf", "int": "iu", "uint": "iu", "bool": "b"}
_EXPECTED = {"float": "a number", "int": "an integer", "uint": "an integer", "bool": "true or false", "bytes": "a string"}


def to_array(data: list[Any], datatype: DataType, shape: tuple[int, ...], where: str, has_bools: bool) -> Array:
    """The elements of a numeric or BOOL tensor, row-major and flat. Raises BadRequest naming the first that does not fit.

    `has_bools` says whether the document has any boolean in it: numpy would take one among numbers for 0 or 1.
    """
    if datatype.name in ("FP16", "BF16"):
        raise BadRequest(f"{where}: {datatype} has no JSON form; send it as a binary tensor (parameters.binary_data_size)")
    array = _nest(data, None, shape, where)
    if array.dtype.kind not in _FITS[datatype.kind] or (has_bools and datatype.kind != "bool"):
        _check_each(data, datatype, where)
        array = np.array(data, datatype.numpy)
    return _narrow(array, datatype, data, where)


def to_wire(data: list[Any], shape: tuple[int, ...], where: str) -> bytes:
    """The elements of a BYTES tensor, in wire form. Raises BadRequest naming the first that is no string."""
    array = _nest(data, object, shape, where)
    for place, text in _walk(data):
        if type(text) is not str:
            raise BadRequest(f"{where}{place}: {show(text)} is {kind_of(text)}; expected a string")
    return wire.pack(text.encode() for text in array.ravel())


def _nest(data: list[Any], dtype: type | None, shape: tuple[int, ...], where: str) -> Array:
    """The data as an array, whose nesting must be the shape's, or none."""
    count = math.prod(shape)
    try:
        array = np.array(data, dtype)
    except (ValueError, OverflowError):
        raise BadRequest(f"{where}: rows of different lengths; expected {count} elements nested as {list(shape)}") from None
    if array.shape != shape and array.shape != (count,):
        raise BadRequest(
            f"{where}: elements nested as {list(array.shape)}; shape {list(shape)} takes {count} of them, nested so or flat"
        )
    return array


def _narrow(array: Array, datatype: DataType, data: list[Any], where: str) -> Array:
    """The array in the tensor's own type, with everything still in range."""
    if array.dtype == datatype.numpy or not array.size:
        return array.astype(datatype.numpy, copy=False)
    if datatype.kind == "float":
        with np.errstate(over="ignore"):
            narrow = array.astype(datatype.numpy)
        if not np.isfinite(narrow).all():
            _check_each(data, datatype, where)
        return narrow
    limits = _limits(datatype)
    if array.min() < limits.min or array.max() > limits.max:
        _check_each(data, datatype, where)
    return array.astype(datatype.numpy)


def _check_each(data: list[Any], datatype: DataType, where: str) -> None:
    """Look at each element by itself, and raise BadRequest for the first that the data type cannot hold."""
    kinds: tuple[type, ...] = {"float": (int, float), "bool": (bool,)}.get(datatype.kind, (int,))
    for place, value in _walk(data):
        if type(value) not in kinds:
            expected = f"{_EXPECTED[datatype.kind]} for {datatype}"
            raise BadRequest(f"{where}{place}: {show(value)} is {kind_of(value)}; expected {expected}")
        if not _in_range(value, datatype):
            raise BadRequest(f"{where}{place}: {show(value)} is out of range for {datatype} ({_range(datatype)})")


def _in_range(value: float, datatype: DataType) -> bool:
    if datatype.kind == "bool":
        return True
    if datatype.kind == "float":
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.float64(value).astype(datatype.numpy)))
    limits = _limits(datatype)
    return bool(limits.min <= value <= limits.max)


def _limits(datatype: DataType) -> Any:
    return np.finfo(datatype.numpy) if datatype.kind == "float" else np.iinfo(datatype.numpy)


def _range(datatype: DataType) -> str:
    limits = _limits(datatype)
    return f"{limits.min} to {limits.max}"


def _walk(data: list[Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Every element with its place, such as `[0][3]`. The nesting is known to be within numpy's 64 levels."""
    for index, value in enumerate(data):
        if type(value) is list:
            yield from _walk(value, f"{place}[{index}]")
        else:
            yield f"{place}[{index}]", value
