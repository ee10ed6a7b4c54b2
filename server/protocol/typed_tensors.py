"""Tensors that a client sends as values of one type (gRPC's typed contents) or as raw bytes, without JSON."""

import math
from typing import Any, NamedTuple

import numpy as np

from engines import wire

from ..errors import BadRequest
from .json_document import Object, count
from .json_tensors import Array, InputDeclaration
from .split_body import Buffer, RequestBody, checked

FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field that holds the values of each data type; FP16 and BF16 have none."""


class Typed(NamedTuple):
    """The values of one input: in an array of the field's own type, or the elements of a BYTES tensor."""

    field: str
    values: Array | list[bytes]


class TensorsBody(RequestBody):
    """A document whose inputs each have their `data` as a memoryview of raw bytes, as `Typed`, or not at all."""

    def data(self, entry: Object, values: Object, declared: InputDeclaration) -> Buffer:
        given = entry.get("data")
        if isinstance(given, memoryview):
            return _raw(given, declared)
        return _typed(given, declared)


def _raw(data: memoryview, declared: InputDeclaration) -> memoryview:
    spec = declared.spec
    if spec.datatype.size and len(data) != (expected := spec.nbytes(declared.shape)):
        raise BadRequest(f"{declared}: {count(len(data), 'byte')} in raw_input_contents; the shape asks for {expected}")
    return checked(data, declared)


def _typed(given: Typed | None, declared: InputDeclaration) -> Buffer:
    datatype, size = declared.spec.datatype, math.prod(declared.shape)
    where, expected = f"{declared.where}contents", FIELDS.get(datatype.name)
    if expected is None:
        raise BadRequest(f"{where}: {datatype} has no typed form; send it in raw_input_contents")
    if given is None:
        if not size:
            return b""
        raise BadRequest(f"{where}: missing; expected {expected}, or the tensor in raw_input_contents")
    if given.field != expected:
        raise BadRequest(f"{where}.{given.field}: given; expected {expected} for {datatype}")
    if len(given.values) != size:
        came = count(len(given.values), "element")
        raise BadRequest(f"{declared}: {came} in contents.{expected}; the shape asks for {size}")
    if isinstance(given.values, list):
        return wire.pack(given.values)
    return _narrowed(given.values, f"{where}.{expected}", declared)


def _narrowed(values: Array, where: str, declared: InputDeclaration) -> Array:
    """The values in the input's own type. Raises BadRequest for the first that is out of its range."""
    datatype = declared.spec.datatype
    dtype: Any = datatype.numpy
    if datatype.kind in ("int", "uint") and values.dtype != dtype:
        limits = np.iinfo(dtype)
        outside = (values < limits.min) | (values > limits.max)
        if outside.any():
            index = int(outside.argmax())
            reach = f"({limits.min} to {limits.max})"
            raise BadRequest(f"{where}[{index}]: {values[index]} is out of range for {datatype} {reach}")
    narrowed: Array = values.astype(dtype, copy=False)
    return narrowed
