"""Converts JSON tensor data, nested or flat, into typed elements; refuses every value that the data type cannot hold.

Types are checked before numpy sees a list: numpy would accept "1" and true as 1 and floats as integers, and would give every
number the size of the longest string beside it.

NaN and infinity in answers are not JSON numbers, and are written as Triton writes them, or as null.
"""

import math
from collections.abc import Callable
from itertools import chain, zip_longest
from typing import Any, NamedTuple, NoReturn

import numpy as np
import orjson

from engines import DataType, TensorSpec, wire

from ..errors import BadRequest
from ..link.messages import Shape
from .json_document import Object, count, is_beyond, kind_of, refuse, show

Array = np.ndarray[Any, np.dtype[Any]]

_TYPES: dict[str, set[type]] = {"float": {int, float}, "int": {int}, "uint": {int}, "bool": {bool}, "bytes": {str}}
_EXPECTED = {"float": "a number", "int": "an integer", "uint": "an integer", "bool": "true or false", "bytes": "a string"}


class InputDeclaration(NamedTuple):
    """An input as declared in a request, without its data. `where` is its JSON path, ending in a dot, such as `inputs[0].`."""

    where: str
    spec: TensorSpec
    shape: Shape

    def __str__(self) -> str:
        return f"{self.where[:-1]} ({self.spec.name!r}), {self.spec.datatype} {list(self.shape)}"


def from_json(entry: Object, declared: InputDeclaration) -> Array | bytes:
    """The `data` of an input: its elements, or those of a BYTES tensor in wire format. Raises BadRequest."""
    data = entry["data"]
    if type(data) is not list and not isinstance(data, np.ndarray):
        refuse(f"{declared.where}data", data, "an array")
    convert: Callable[[Any, InputDeclaration], Array | bytes] = to_wire if declared.spec.datatype.kind == "bytes" else to_array
    return convert(data, declared)


def to_array(data: "list[Any] | Array", declared: InputDeclaration) -> Array:
    """The elements of a numeric or BOOL tensor, row-major and flat. Raises BadRequest naming the first invalid one.

    An array is the result of earlier calls for its slices; only its length is checked.
    """
    if isinstance(data, np.ndarray):
        if len(data) == math.prod(declared.shape):
            return data
        return to_array(data.tolist(), declared)  # Raises with the right message.
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
        elements.refuse_range(next(index for index, value in enumerate(elements.values) if not low <= value <= high))
    if datatype.kind == "float" and not (finite := np.isfinite(array)).all():
        elements.refuse_range(int(finite.argmin()))
    return array


def to_wire(data: list[Any], declared: InputDeclaration) -> bytes:
    """The elements of a BYTES tensor in wire format. Raises BadRequest naming the first that is not a string."""
    return wire.pack(text.encode() for text in _elements(data, declared).values)


class Elements(NamedTuple):
    """The elements of a tensor as a flat list, and the dimensions in which its data was nested, for error paths."""

    values: list[Any]
    dims: Shape
    declared: InputDeclaration

    def refuse_type(self, index: int) -> NoReturn:
        value, datatype = self.values[index], self.declared.spec.datatype
        if datatype.kind in ("int", "uint") and is_beyond(value):
            self.refuse_range(index)
        refuse(self._path(index), value, f"{_EXPECTED[datatype.kind]} for {datatype}")

    def refuse_range(self, index: int) -> NoReturn:
        datatype = self.declared.spec.datatype
        low, high = _limits(datatype)
        value = self.values[index]
        shown = f"{value}" if datatype.kind == "float" else show(value)
        raise BadRequest(f"{self._path(index)}: {shown} is out of range for {datatype} ({low} to {high})")

    def _path(self, index: int) -> str:
        return f"{self.declared.where}data{_indices(index, self.dims)}"


def _elements(data: list[Any], declared: InputDeclaration) -> Elements:
    """The elements, with their count checked against the shape and their JSON types against the data type."""
    shape = declared.shape
    size = math.prod(shape)
    nested = len(shape) > 1 and bool(data) and type(data[0]) is list
    elements = Elements(_unnest(data, declared), shape, declared) if nested else Elements(data, (size,), declared)
    if len(elements.values) != size:
        came = count(len(data), "element")
        raise BadRequest(f"{declared}: {came} in data; the shape asks for {size}, nested that way or flat")
    types = _TYPES[declared.spec.datatype.kind]
    if not set(map(type, elements.values)) <= types:
        elements.refuse_type(next(index for index, value in enumerate(elements.values) if type(value) not in types))
    return elements


def _unnest(data: list[Any], declared: InputDeclaration) -> list[Any]:
    """The elements of nested rows, with the length of each row checked against the shape."""
    rows = [data]
    for depth, size in enumerate(declared.shape):
        if not (set(map(type, rows)) <= {list} and set(map(len, rows)) <= {size}):
            _refuse_row(rows, depth, declared)
        rows = list(chain.from_iterable(rows))
    return rows


def _refuse_row(rows: list[Any], depth: int, declared: InputDeclaration) -> NoReturn:
    """Raise BadRequest for the first row at this depth that is not a row, or has the wrong length."""
    size = declared.shape[depth]
    index, row = next((index, row) for index, row in enumerate(rows) if type(row) is not list or len(row) != size)
    indices = _indices(index, declared.shape[:depth]) if depth else ""
    came = f"a row of {len(row)}" if type(row) is list else kind_of(row)
    raise BadRequest(f"{declared}: data{indices} is {came}; the shape asks for a row of {size} there, or for all elements flat")


def _indices(index: int, dims: Shape) -> str:
    """The path to a flat index in nested rows of these dimensions, such as `[0][2]`."""
    indices = []
    for size in reversed(dims[1:]):
        index, position = divmod(index, size)
        indices.append(position)
    return "".join(f"[{position}]" for position in (index, *reversed(indices)))


def _limits(datatype: DataType) -> tuple[Any, Any]:
    dtype: Any = datatype.numpy
    limits = np.finfo(dtype) if datatype.kind == "float" else np.iinfo(dtype)
    return limits.min, limits.max


def dump(array: Array, nonfinite: str) -> bytes:
    """A flat array as JSON. `nonfinite` is "null", or "literal" for `NaN`, `Infinity` and `-Infinity`.

    JavaScript's JSON.parse and strict parsers refuse the literals; Python and RapidJSON, which Triton uses, accept them.
    """
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)  # orjson writes null for NaN and infinity.
    if nonfinite == "null" or array.dtype.kind != "f" or (finite := np.isfinite(array)).all():
        return text
    literals = [b"NaN" if value != value else b"Infinity" if value > 0 else b"-Infinity" for value in array[~finite].tolist()]
    return b"".join(chain.from_iterable(zip_longest(text.split(b"null"), literals, fillvalue=b"")))
