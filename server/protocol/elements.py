"""JSON tensor data into typed elements: nested or flat, and never a value that the data type cannot hold.

numpy gets no list that was not looked through: it would take "1" and true for 1, let floats pass for integers, and give
every number the room of the longest string beside it.
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import numpy as np

from engines import DataType, wire
from server.errors import BadRequest

from .document import count, refuse, show

Array = np.ndarray[Any, np.dtype[Any]]

_TYPES: dict[str, set[type]] = {"float": {int, float}, "int": {int}, "uint": {int}, "bool": {bool}, "bytes": {str}}
_EXPECTED = {"float": "a number", "int": "an integer", "uint": "an integer", "bool": "true or false", "bytes": "a string"}


def to_array(data: "list[Any] | Array", datatype: DataType, shape: tuple[int, ...], where: str) -> Array:
    """The elements of a numeric or BOOL tensor, row-major and flat. Raises BadRequest naming the first that does not fit.

    An array is what this made of them before, in slices.
    """
    if isinstance(data, np.ndarray):
        if len(data) == math.prod(shape):
            return data
        return to_array(data.tolist(), datatype, shape, where)  # Which says what is wrong with it.
    if datatype.name in ("FP16", "BF16"):
        raise BadRequest(f"{where}: {datatype} has no JSON form; send it as a binary tensor (parameters.binary_data_size)")
    elements = _elements(data, datatype, shape, where)
    try:
        with np.errstate(over="ignore"):
            array = np.array(elements.values, datatype.numpy)
    except OverflowError:
        low, high = _limits(datatype)
        elements.refuse_range(next(at for at, value in enumerate(elements.values) if not low <= value <= high), datatype)
    if datatype.kind == "float" and not (finite := np.isfinite(array)).all():
        elements.refuse_range(int(finite.argmin()), datatype)
    return array


def to_wire(data: list[Any], datatype: DataType, shape: tuple[int, ...], where: str) -> bytes:
    """The elements of a BYTES tensor, in wire form. Raises BadRequest naming the first that is no string."""
    return wire.pack(text.encode() for text in _elements(data, datatype, shape, where).values)


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a tensor side by side, and how they stood in the field `where`: in rows of these sizes, if any."""

    values: list[Any]
    dims: tuple[int, ...]
    where: str

    def refuse_type(self, index: int, datatype: DataType) -> NoReturn:
        value = self.values[index]
        if type(value) is float and value.is_integer() and abs(value) >= 2**63:  # What the parser makes of longer integers.
            self.refuse_range(index, datatype)
        refuse(self._place(index), value, f"{_EXPECTED[datatype.kind]} for {datatype}")

    def refuse_range(self, index: int, datatype: DataType) -> NoReturn:
        low, high = _limits(datatype)
        value = show(self.values[index])
        raise BadRequest(f"{self._place(index)}: {value} is out of range for {datatype} ({low} to {high})")

    def _place(self, index: int) -> str:
        places = []
        for size in reversed(self.dims[1:]):
            index, place = divmod(index, size)
            places.append(place)
        return self.where + "".join(f"[{place}]" for place in (index, *reversed(places)))


def _elements(data: list[Any], datatype: DataType, shape: tuple[int, ...], where: str) -> Elements:
    """As many elements as the shape has, each of a JSON type that the data type takes."""
    size = math.prod(shape)
    nested = len(shape) > 1 and bool(data) and type(data[0]) is list
    elements = Elements(_unnest(data, shape, where), shape, where) if nested else Elements(data, (size,), where)
    if len(elements.values) != size:
        came = count(len(data), "element")
        raise BadRequest(f"{where}: {came}; expected {size}, as shape {list(shape)} has, nested so or flat")
    types = _TYPES[datatype.kind]
    if not set(map(type, elements.values)) <= types:
        elements.refuse_type(next(at for at, value in enumerate(elements.values) if type(value) not in types), datatype)
    return elements


def _unnest(data: list[Any], shape: tuple[int, ...], where: str) -> list[Any]:
    """The elements of rows within rows, as many in each as the shape says."""
    rows = [data]
    for size in shape:
        if not (set(map(type, rows)) <= {list} and set(map(len, rows)) <= {size}):
            raise BadRequest(f"{where}: not nested as {list(shape)}; expected rows of these lengths, or all elements flat")
        rows = list(chain.from_iterable(rows))
    return rows


def _limits(datatype: DataType) -> tuple[Any, Any]:
    dtype: Any = datatype.numpy
    limits = np.finfo(dtype) if datatype.kind == "float" else np.iinfo(dtype)
    return limits.min, limits.max
