"""Bodies of inferences read as the protocol describes them, apart from how the server does it."""

import json
from typing import Any

import numpy as np

from .models import KINDS, Arrays

Document = dict[str, Any]
WRITTEN = {"O": {str}, "b": {bool}, "f": {int, float}, "i": {int}, "u": {int}}
"""Which of Python's types JSON's values have, by the kind of numpy's type."""


class Unreadable(Exception):
    """Bytes that are no tensors as the protocol describes them."""


def binary_elements(elements: list[bytes]) -> bytes:
    """A BYTES tensor."""
    return b"".join(len(element).to_bytes(4, "little") + element for element in elements)


def body_of(data: bytes, size: int | None) -> tuple[Document, bytes]:
    """The JSON, and what follows it. Raises Unreadable."""
    head = len(data) if size is None else size
    try:
        document = json.loads(data[:head])
    except (ValueError, RecursionError) as error:
        raise Unreadable(str(error)) from error
    if not isinstance(document, dict):
        raise Unreadable("no object")
    return document, data[head:]


def tensors(entries: Any, rest: bytes) -> Arrays:
    """Tensors by name; those that are binary have their bytes in `rest`, of which nothing may be left. Raises Unreadable."""
    found: Arrays = {}
    try:
        for entry in entries:
            size = (entry.get("parameters") or {}).get("binary_data_size", 0)
            if entry["name"] in found:
                raise Unreadable(f"{entry['name']} twice")
            found[entry["name"]] = _array(entry, rest[:size])
            rest = rest[size:]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Unreadable(repr(error)) from error
    if rest:
        raise Unreadable(f"{len(rest)} bytes are left")
    return found


def _array(entry: Document, data: bytes) -> Any:
    code = KINDS[entry["datatype"]][1]
    if entry.get("data") is not None:
        values = _flat(entry["data"])
        if not {type(value) for value in values} <= WRITTEN[np.dtype(code).kind]:
            raise Unreadable(f"not all {entry['datatype']}: {values[:5]}")
        return np.array(values, code).reshape(entry["shape"])
    if code == "O":
        return np.array([text(element) for element in elements(data)], object).reshape(entry["shape"])
    return np.frombuffer(data, code).reshape(entry["shape"])


def _flat(data: Any) -> list[Any]:
    return [element for part in data for element in _flat(part)] if isinstance(data, list) else [data]


def text(element: bytes) -> str:
    """An element of a BYTES tensor, which need not be UTF-8: other bytes are surrogates, as Python has them in file names."""
    return element.decode(errors="surrogateescape")


def elements(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = int.from_bytes(data[:4], "little")
        if len(data) < 4 + size:
            raise Unreadable("an element is cut")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found
