"""A JSON document, strictly: what is not JSON, or says a key twice, is refused; and fields with their names in errors."""

import json
from typing import Any, NoReturn

import orjson

from server.errors import BadRequest

from .json_errors import explain

Object = dict[str, Any]

_KINDS: dict[type, str] = {
    dict: "an object", list: "an array", str: "a string", int: "an integer", float: "a number", bool: "a boolean",
    type(None): "null",
}  # fmt: skip


def parse(data: "bytes | memoryview", what: str = "the request body", tensors: bool = True) -> Object:
    """Parse a JSON object. Raises BadRequest for anything else, for NaN, and for a key that stands twice.

    `tensors` is whether binary tensors could follow it, of which errors then remind.
    """
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        text = bytes(data)
        if not text.strip():
            raise BadRequest(f"{what} is empty; expected an object") from None
        raise BadRequest(f"{what} is not JSON: {explain(text, error, tensors)}") from error
    if type(document) is not dict:
        raise BadRequest(f"{what} is {kind_of(document)}; expected an object")
    # Every key takes a colon, so as many colons as keys leave none for a key that stands twice. Strings with colons in
    # them only make the count too high, and then the slow parser decides.
    if bytes(data).count(b":") != _count_keys(document):
        _refuse_repeated_keys(data, what)
    return document


def kind_of(value: object) -> str:
    """What a JSON value is, for people."""
    return _KINDS[type(value)]


def field(parent: Object, key: str, kind: type, where: str = "", required: bool = False) -> Any:
    """The value of a field, or None if it is absent; BadRequest naming it if it is of another kind.

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
    """Raise BadRequest for this value of this field, with its kind unless that is plain to see or what was expected."""
    what = "" if value is None or expected.startswith(kind_of(value)) else f" is {kind_of(value)}"
    raise BadRequest(f"{where}: {show(value)}{what}; expected {expected}")


def show(value: object) -> str:
    """A value as short JSON, for messages."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "something nested very deeply"
    return short(text)


def short(text: str) -> str:
    """As much of a text that somebody sent as a message may repeat."""
    return text if len(text) <= 40 else f"{text[:40]}..."


def count(number: int, what: str) -> str:
    """A number of things, in words: 1 byte, 2 bytes."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _count_keys(document: Object) -> int:
    """Keys of an inference request, wherever the protocol has objects: not in tensor data, which has none."""
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


def _refuse_repeated_keys(data: "bytes | memoryview", what: str) -> None:
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
