"""Strict JSON parsing, which refuses repeated keys, and typed access to fields with errors that name them.

Why bytes are not JSON is explained with what was found, at which offset, and what to send instead; for that the document, which
may have a megabyte, is not parsed a second time.
"""

import json
import re
from decimal import Decimal
from typing import Any, NoReturn

import orjson
from orjson import JSONDecodeError

from ..errors import BadRequest

Object = dict[str, Any]

_KINDS: dict[type, str] = {
    dict: "an object", list: "an array", str: "a string", int: "an integer", float: "a number", bool: "a boolean",
    type(None): "null",
}  # fmt: skip
_NONFINITE = re.compile(rb"[-+]?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
_NAME = re.compile(rb'"name"\s*:\s*"([^"\\]{1,40})"')
_DATA = re.compile(rb'"data"\s*:')
_SHOWN = 16
"""Bytes of the document that a message quotes."""


def parse(data: "bytes | memoryview", what: str = "the request body", tensors: bool = True) -> Object:
    """Parse a JSON object. Raises BadRequest for anything else, for NaN, and for a repeated key.

    `what` names the data in errors. `tensors`: whether binary tensors could follow, so that errors mention them.
    """
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        text = bytes(data)
        if not text.strip():
            raise BadRequest(f"{what} is empty; expected an object") from None
        raise BadRequest(f"{what} is not JSON: {_explain(text, error, tensors)}") from error
    if type(document) is not dict:
        raise BadRequest(f"{what} is {kind_of(document)}; expected an object")
    # Each key takes one colon, so if there are as many colons as distinct keys, no key is repeated. Colons inside strings
    # only make the count too high; then the slow parser decides.
    if bytes(data).count(b":") != _count_keys(document):
        refuse_repeated_keys(data, what)
    return document


def kind_of(value: object) -> str:
    """The JSON type of a value, in words."""
    return _KINDS[type(value)]


def field(parent: Object, key: str, kind: type, where: str = "", required: bool = False) -> Any:
    """The value of a field, or None if it is absent or null. Raises BadRequest if its type is wrong, or it is required.

    `where` is the path of `parent`, ending in a dot, such as `inputs[0].`.
    """
    value = parent.get(key)
    if value is None:
        if required:
            raise BadRequest(f"{where}{key}: missing; expected {_KINDS[kind]}")
        return None
    if type(value) is not kind:
        refuse(f"{where}{key}", value, _KINDS[kind])
    return value


def parameters(parent: Object, where: str = "") -> Object:
    """The `parameters` of an object, each a string, a number or a boolean. Raises BadRequest."""
    values: Object = field(parent, "parameters", dict, where) or {}
    for key, value in values.items():
        if type(value) not in (str, int, float, bool):
            refuse(f"{where}parameters.{short(key)}", value, "a string, a number or true or false")
    return values


def unsigned(values: Object, key: str, where: str = "parameters.") -> int | None:
    """A field that is an integer of at least 0, or None if it is absent. Raises BadRequest."""
    value = values.get(key)
    if value is not None and (type(value) is not int or value < 0):
        refuse(f"{where}{key}", value, "an integer of at least 0")
    return value


def flag(values: Object, key: str, where: str = "parameters.") -> bool | None:
    """A field that is true or false, or None if it is absent. Raises BadRequest."""
    value = values.get(key)
    if value is not None and type(value) is not bool:
        refuse(f"{where}{key}", value, "true or false")
    return value


def refuse(where: str, value: object, expected: str) -> NoReturn:
    """Raise BadRequest for the value of a field, with its type unless that is obvious or was expected."""
    what = "" if value is None or expected.startswith(kind_of(value)) else f" is {kind_of(value)}"
    if is_beyond(value) and expected.startswith("an integer"):
        what = " has more than 64 bits"
    raise BadRequest(f"{where}: {show(value)}{what}; expected {expected}")


def is_beyond(value: object) -> bool:
    """Whether this is an integer beyond 64 bits, which the parser has made a float."""
    return type(value) is float and abs(value) >= 2**63 and value.is_integer()


def show(value: object) -> str:
    """A value as JSON, shortened for messages. Of integers beyond 64 bits the first 17 digits are right."""
    try:
        text = json.dumps(int(Decimal(repr(value))) if is_beyond(value) else value, ensure_ascii=False)
    except RecursionError:
        return "something nested very deeply"
    return short(text)


def short(text: str) -> str:
    """A text from a client, shortened for messages."""
    return text if len(text) <= 40 else f"{text[:40]}..."


def count(number: int, what: str) -> str:
    """A number with its noun: 1 byte, 2 bytes."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _count_keys(document: Object) -> int:
    """The number of keys in an inference request. Tensor data is not searched: it has no objects."""
    count, objects = 0, [document]
    while objects:
        current = objects.pop()
        count += len(current)
        for key, value in current.items():
            if type(value) is dict:
                objects.append(value)
            elif type(value) is list and key != "data":
                objects += [item for item in value if type(item) is dict]
    return count


def refuse_repeated_keys(data: "bytes | memoryview", what: str) -> None:
    """Raise BadRequest for JSON, `what`, with a key twice in one object."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRequest(f"{what} has the key {show(key)} twice in one object")
            seen.add(key)

    try:
        json.loads(bytes(data), object_pairs_hook=check)
    except RecursionError:
        raise BadRequest(f"{what} is nested too deeply") from None


def _explain(data: bytes, error: JSONDecodeError, tensors: bool = True) -> str:
    """Why orjson refused these bytes with this error; `tensors`: whether binary tensors could follow them."""
    try:
        text = data.decode()
    except UnicodeDecodeError as wrong:
        found = f"{data[wrong.start]:#04x} at byte {wrong.start} is not UTF-8 ({wrong.reason})"
        return found + _after_json(data[: wrong.start])
    offset = len(text[: error.pos].encode())
    if offset == len(data):
        hint = "; Inference-Header-Content-Length, where it is sent, counts all of the JSON" if tensors else ""
        return f"{error.msg} at byte {offset}, where it ends{hint}"
    return _explain_at(data, offset, error.msg)


def _explain_at(data: bytes, offset: int, message: str) -> str:
    # The parser reports the position after the sign of -Infinity.
    start = offset - (data[max(offset - 1, 0) : offset] in (b"-", b"+"))
    position = _element(data, start)
    if found := _NONFINITE.match(data, start):
        instead = ": send the tensor as binary data (parameters.binary_data_size)" if position else ""
        return f"{found[0].decode()} at byte {start}{position}; JSON has no NaN and no infinity{instead}"
    hint = _after_json(data[:offset]) if "after document" in message else ""
    return f"{message}: {_excerpt(data[offset:])} at byte {offset}{position}{hint}"


def _element(data: bytes, offset: int) -> str:
    """The element and input at this offset, empty if it is not tensor data. The name is known if it precedes the data."""
    entry = data[data.rfind(b"{", 0, offset) + 1 : offset]  # Tensor data has no objects in it.
    begin = _DATA.search(entry)
    row = entry[begin.end() :] if begin else b""
    if not begin or b'"' in row or row.count(b"[") <= row.count(b"]"):  # Another key follows the data, or the row has ended.
        return ""
    name = _NAME.search(entry, 0, begin.start())
    of = f"input {name[1].decode()!r}" if name else "an input"
    return f", element {row.count(b',')} in the data of {of}"


def _after_json(before: bytes) -> str:
    if b"binary_data_size" not in before:
        return ""
    return "; where binary tensors follow the JSON, the header Inference-Header-Content-Length says how long it is"


def _excerpt(data: bytes) -> str:
    """The first bytes on one line, escaped."""
    text = data[:_SHOWN].decode(errors="ignore")
    plain = "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in text)
    return plain if len(data) <= _SHOWN else f"{plain}..."
