"""Large JSON in time slices: almost all of it is one flat array of numbers, which is parsed and written in chunks.

The results are the same as without slices. Any unusual document is parsed as a whole, which also produces the error messages.
"""

import re
from typing import NamedTuple

import numpy as np
import orjson

from engines import DATATYPES, DataType, TensorSpec

from ..errors import BadRequest
from .json_document import Object, parse
from .json_tensors import Array, InputDeclaration, dump, to_array
from .time_slices import Steps

SLICE = 1 << 16
"""Bytes of JSON parsed per time slice: a third of a millisecond."""
ELEMENTS = 1 << 13
"""Elements written per time slice."""

_DATA = re.compile(rb'(?<!\\)"data"[ \t\r\n]*:[ \t\r\n]*\[')
"""An unescaped quote begins or ends a string; in valid JSON, this pattern starts at a key."""
_PLACEHOLDER = rb'"\u0000"'
"""Replaces the extracted row. JSON has only this spelling of it, so a document that contains it is easily detected."""


class Row(NamedTuple):
    """A document without the `data` of one input, `entry`; `text` is that data without its brackets."""

    document: Object
    entry: Object
    datatype: DataType
    text: bytes

    @property
    def timeout(self) -> float | None:
        """The request's timeout in seconds; None if it has none, or an invalid one."""
        values = self.document.get("parameters")
        value = values.get("timeout") if type(values) is dict else None
        return value / 1e6 if type(value) is int and value > 0 else None


def extract_row(data: bytes) -> Row | None:
    """Extract the first long flat row of a JSON document; None if there is none, or the rest is invalid."""
    for found in _DATA.finditer(data):
        end = data.find(b"]", found.end())
        if end - found.end() > SLICE:
            return _row(data[: found.end() - 1], data[found.end() : end], data[end + 1 :])
    return None


def _row(before: bytes, text: bytes, after: bytes) -> Row | None:
    if _PLACEHOLDER in before or _PLACEHOLDER in after:
        return None
    try:
        document = parse(before + _PLACEHOLDER + after)
    except BadRequest:
        return None
    inputs = document.get("inputs")
    for entry in inputs if type(inputs) is list else ():
        if type(entry) is dict and entry.get("data") == "\0":
            datatype = DATATYPES.get(str(entry.get("datatype")))
            return Row(document, entry, datatype, text) if datatype and datatype.kind != "bytes" else None
    return None


def parse_row(row: Row) -> Steps[bool]:
    """Put the row back into its document as a numpy array; False if it has any invalid element."""
    chunks, start, text = [], 0, row.text
    spec = TensorSpec("", row.datatype, ())
    while start <= len(text):
        end = text.find(b",", start + SLICE)
        end = len(text) if end < 0 else end
        try:
            values = orjson.loads(b"[%b]" % text[start:end])
            chunks.append(to_array(values, InputDeclaration("", spec, (len(values),))))
        except (orjson.JSONDecodeError, BadRequest):
            return False
        if not values:
            return False  # Two commas in a row, or a trailing one.
        start = end + 1
        yield
    row.entry["data"] = np.concatenate(chunks)
    return True


def dump_slices(array: Array, nonfinite: str) -> Steps[orjson.Fragment]:
    """The flat array as JSON, as `nonfinite.dump` writes it."""
    chunks = []
    for start in range(0, len(array), ELEMENTS):
        chunks.append(dump(array[start : start + ELEMENTS], nonfinite)[1:-1])
        yield
    return orjson.Fragment(b"[%b]" % b",".join(chunks))


def parse_slices(data: bytes, row: Row | None) -> Steps[Object]:
    """The document, with the row from `extract_row` parsed in slices, or parsed as a whole. Raises as `parse` does."""
    if row and (yield from parse_row(row)):
        return row.document
    document = parse(data)
    yield
    return document
