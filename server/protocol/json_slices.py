"""Large JSON in slices: nearly all of it is one flat row of numbers, which can be read, and written, a part at a time.

What comes of the slices is what comes of the whole. Whatever is out of the ordinary is left to be read as a whole, which
also finds the words for what is wrong with it.
"""

import re
from typing import NamedTuple

import numpy as np
import orjson

from engines import DATATYPES, DataType, TensorSpec
from server.errors import BadRequest
from server.protocol.time_slices import Steps

from .json_document import Object, parse
from .json_tensors import Array, Declared, to_array
from .nonfinite import dump

SLICE = 1 << 16
"""Bytes of JSON to read at a time: a third of a millisecond."""
ELEMENTS = 1 << 13
"""Elements to write at a time."""

_DATA = re.compile(rb'(?<!\\)"data"[ \t\r\n]*:[ \t\r\n]*\[')
"""A quote without a backslash begins or ends a string: where the rest is JSON, this begins a key."""
_MARK = rb'"\u0000"'
"""What stands in for the row; JSON has no second way to write it."""


class Row(NamedTuple):
    """A document that lacks the `data` of one of its inputs, which is this text without its brackets."""

    document: Object
    entry: Object
    datatype: DataType
    text: bytes

    @property
    def timeout(self) -> float | None:
        """The request's, in seconds, if it has one, and a right one."""
        values = self.document.get("parameters")
        value = values.get("timeout") if type(values) is dict else None
        return value / 1e6 if type(value) is int and value > 0 else None


def cut(data: bytes) -> Row | None:
    """Take the first long flat row out of a JSON document; None if there is none, or anything is wrong with the rest."""
    for found in _DATA.finditer(data):
        end = data.find(b"]", found.end())
        if end - found.end() > SLICE:
            return _row(data[: found.end() - 1], data[found.end() : end], data[end + 1 :])
    return None


def _row(before: bytes, text: bytes, after: bytes) -> Row | None:
    if _MARK in before or _MARK in after:
        return None
    try:
        document = parse(before + _MARK + after)
    except BadRequest:
        return None
    inputs = document.get("inputs")
    for entry in inputs if type(inputs) is list else ():
        if type(entry) is dict and entry.get("data") == "\0":
            datatype = DATATYPES.get(str(entry.get("datatype")))
            return Row(document, entry, datatype, text) if datatype and datatype.kind != "bytes" else None
    return None


def read(row: Row) -> Steps[bool]:
    """Put the row back into its document, as an array of its data type; False if it has anything else in it."""
    parts, start, text = [], 0, row.text
    spec = TensorSpec("", row.datatype, ())
    while start <= len(text):
        end = text.find(b",", start + SLICE)
        end = len(text) if end < 0 else end
        try:
            values = orjson.loads(b"[%b]" % text[start:end])
            parts.append(to_array(values, Declared("", spec, (len(values),))))
        except (orjson.JSONDecodeError, BadRequest):
            return False
        if not values:
            return False  # Two commas, or one too many at the end.
        start = end + 1
        yield
    row.entry["data"] = np.concatenate(parts)
    return True


def write(array: Array, nonfinite: str) -> Steps[orjson.Fragment]:
    """The array as `nonfinite.dump` has it in JSON, flat."""
    parts = []
    for start in range(0, len(array), ELEMENTS):
        parts.append(dump(array[start : start + ELEMENTS], nonfinite)[1:-1])
        yield
    return orjson.Fragment(b"[%b]" % b",".join(parts))


def parse_slices(data: bytes, row: Row | None) -> Steps[Object]:
    """The document, with what `cut` took out of it, or read as a whole; raises as `parse` does."""
    if row and (yield from read(row)):
        return row.document
    document = parse(data)
    yield
    return document
