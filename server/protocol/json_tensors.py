"""JSON tensor data into typed elements: nested or flat, and never a value that the data type cannot hold.

numpy gets no list that was not looked through: it would take "1" and true for 1, let floats pass for integers, and give
every number the room of the longest string beside it.
"""

import math
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import numpy as np

from engines import DataType, TensorSpec, wire
from server.errors import BadRequest
from server.link.messages import Shape

from .json_document import count, kind_of, refuse, show

Array = np.ndarray[Any, np.dtype[Any]]

_TYPES: dict[str, set[type]] = {"float": {int, float}, "int": {int}, "uint": {int}, "bool": {bool}, "bytes": {str}}
_EXPECTED = {"float": "a number", "int": "an integer", "uint": "an integer", "bool": "true or false", "bytes": "a string"}


class Declared(NamedTuple):
    """What a request says of an input beside its data. `where` is its path, ending in a dot, such as `inputs[0].`."""

    where: str
    spec: TensorSpec
    shape: Shape

    def __str__(self) -> str:
        return f"{self.where[:-1]} ({self.spec.name!r}), {self.spec.datatype} {list(self.shape)}"


def to_array(data: "list[Any] | Array", declared: Declared) -> Array:
    """The elements of a numeric or BOOL tensor, row-major and flat. Raises BadRequest naming the first that does not fit.

    An array is what this made of them before, in slices.
    """
    if isinstance(data, np.ndarray):
        if len(data) == math.prod(declared.shape):
            return data
        return to_array(data.tolist(), declared)  # Which says what is wrong with it.
    datatype = declared.spec.datatype
    if datatype.name in ("FP16", "BF16"):
        instead = "send it as a binary tensor (parameters.binary_data_size)"
        raise BadRequest(f"{declared.where}data: {datatype} has no JSON form; {instead}")
    elements = _elements(data, declared)
    try:
        with np.errstate(over="ignore"):
            array = np.array(elements.values, datatype.numpy)
    except OverflowError:
        low, high = _limits(datatype)
        elements.refuse_range(next(at for at, value in enumerate(elements.values) if not low <= value <= high))
    if datatype.kind == "float" and not (finite := np.isfinite(array)).all():
        elements.refuse_range(int(finite.argmin()))
    return array


def to_wire(data: list[Any], declared: Declared) -> bytes:
    """The elements of a BYTES tensor, in wire form. Raises BadRequest naming the first that is no string."""
    return wire.pack(text.encode() for text in _elements(data, declared).values)


class Elements(NamedTuple):
    """The elements of a tensor side by side, and how they stood in its data: in rows of these sizes, if any."""

    values: list[Any]
    dims: Shape
    declared: Declared

    def refuse_type(self, index: int) -> NoReturn:
        value, datatype = self.values[index], self.declared.spec.datatype
        is_number = type(value) is float and datatype.kind in ("int", "uint")
        if is_number and value.is_integer() and abs(value) >= 2**63:  # What the parser makes of longer integers.
            self.refuse_range(index)
        refuse(self._path(index), value, f"{_EXPECTED[datatype.kind]} for {datatype}")

    def refuse_range(self, index: int) -> NoReturn:
        datatype = self.declared.spec.datatype
        low, high = _limits(datatype)
        raise BadRequest(f"{self._path(index)}: {show(self.values[index])} is out of range for {datatype} ({low} to {high})")

    def _path(self, index: int) -> str:
        return f"{self.declared.where}data{_place(index, self.dims)}"


def _elements(data: list[Any], declared: Declared) -> Elements:
    """As many elements as the shape has, each of a JSON type that the data type takes."""
    shape = declared.shape
    size = math.prod(shape)
    nested = len(shape) > 1 and bool(data) and type(data[0]) is list
    elements = Elements(_unnest(data, declared), shape, declared) if nested else Elements(data, (size,), declared)
    if len(elements.values) != size:
        came = count(len(data), "element")
        raise BadRequest(f"{declared}: {came} in data; the shape asks for {size}, nested so or flat")
    types = _TYPES[declared.spec.datatype.kind]
    if not set(map(type, elements.values)) <= types:
        elements.refuse_type(next(at for at, value in enumerate(elements.values) if type(value) not in types))
    return elements


def _unnest(data: list[Any], declared: Declared) -> list[Any]:
    """The elements of rows within rows, as many in each as the shape says."""
    rows = [data]
    for depth, size in enumerate(declared.shape):
        if not (set(map(type, rows)) <= {list} and set(map(len, rows)) <= {size}):
            _refuse_row(rows, depth, declared)
        rows = list(chain.from_iterable(rows))
    return rows


def _refuse_row(rows: list[Any], depth: int, declared: Declared) -> NoReturn:
    """Name the first of these rows, so deep in the data, that is none, or of another length."""
    size = declared.shape[depth]
    index, row = next((index, row) for index, row in enumerate(rows) if type(row) is not list or len(row) != size)
    place = _place(index, declared.shape[:depth]) if depth else ""
    came = f"a row of {len(row)}" if type(row) is list else kind_of(row)
    raise BadRequest(f"{declared}: data{place} is {came}; the shape asks for a row of {size} there, or for all elements flat")


def _place(index: int, dims: Shape) -> str:
    """Where in rows of these sizes this element stands, as indices."""
    places = []
    for size in reversed(dims[1:]):
        index, place = divmod(index, size)
        places.append(place)
    return "".join(f"[{place}]" for place in (index, *reversed(places)))


def _limits(datatype: DataType) -> tuple[Any, Any]:
    dtype: Any = datatype.numpy
    limits = np.finfo(dtype) if datatype.kind == "float" else np.iinfo(dtype)
    return limits.min, limits.max
