"""Reads `config.pbtxt`, and its JSON form, into the protobuf message of `triton_schema`.

Fields that have no effect here are reported and otherwise tolerated, so that a repository made for Triton can be served
unchanged. Fields that Triton does not know either are left out and reported as misspelt.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import orjson
from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from ..errors import BadRequest
from ..protocol.json_document import refuse_repeated_keys, short, show
from .triton_schema import MESSAGE, ignored

# Strings, comments, words and numbers, and any other single character.
_TOKEN = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*|[\w.+-]+|[^\s\w]""")

MOST_BYTES = 64 * 1024
"""Bytes of a configuration in a request. The device's process reads it too, with an interpreter that all tenants share."""
MOST_VALUES = 1024
"""Values in it, objects and arrays included: enough for some 80 fully described tensors. Reading takes 10 to 20 ms."""
_SUGGESTIONS = 4
"""How many unknown fields get a suggestion; looking one up takes a millisecond."""

Words = Iterator[tuple[tuple[str, int], tuple[str, int]]]
"""Tokens: each with the position of its end, and the token after it."""


class ConfigRefused(ValueError):
    """A model configuration that is refused; the text names the file, the place, what came and what was expected."""


class Reading(NamedTuple):
    """The message, and the names of fields without effect, each once; nested ones as `input.reshape`.

    Fields that Triton does not know come first, in their order, each followed by what is wrong with it in parentheses.
    """

    message: Any
    unread: tuple[str, ...]


def read_text(text: str, source: str) -> Reading:
    """Read protobuf's text form; `source` is its name in errors. Raises ConfigRefused."""
    message = MESSAGE()
    known, unread = _blank_unread(text, message.DESCRIPTOR, source)
    try:
        text_format.Parse(known, message)
    except (text_format.ParseError, ValueError) as error:
        hint = "; expected a data type such as TYPE_FP32" if "DataType" in str(error) else ""
        raise ConfigRefused(f"{source}:{_tidy(str(error))}{hint}") from error
    return Reading(message, tuple(dict.fromkeys([*unread, *ignored(message)])))


def read_json(text: str, source: str) -> Reading:
    """Read the JSON form; `source` is its name in errors. Raises ConfigRefused, also for one that is too large."""
    message, unread = MESSAGE(), list[str]()
    try:
        if (nbytes := len(data := text.encode("utf-8", "surrogatepass"))) > MOST_BYTES:
            raise ValueError(f"{nbytes} bytes; expected at most {MOST_BYTES}")
        document = orjson.loads(data)
        _check_count(document)
        refuse_repeated_keys(data, "it")
        known = _known(document, message.DESCRIPTOR, "", unread)
        json_format.ParseDict(known, message)
    except (json_format.ParseError, ValueError, BadRequest) as error:
        raise ConfigRefused(f"{source}: {_tidy(str(error))}") from error
    return Reading(message, tuple(dict.fromkeys([*unread, *ignored(message)])))


def _tidy(text: str) -> str:
    """protobuf's error in one line, without the line of the file that it quotes, and with long words shortened."""
    first = re.sub(r"^(\d+:\d+ : )'.*': ", r"\1", text.partition("\n")[0])
    return re.sub(r"(\S{50})\S+", r"\1...", first)


def _blank_unread(text: str, schema: Descriptor, source: str) -> tuple[str, list[str]]:
    """The text with unknown fields replaced by spaces, which keeps line numbers right, and the names of these fields.

    protobuf can skip unknown fields itself, but fails at `instance_group [ { ... } ]`, which nearly every file has.
    """
    tokens = [token for token in _TOKEN.finditer(text) if not token[0].startswith("#")]
    words = pairwise([*((token[0], token.end()) for token in tokens), ("", len(text))])
    unread, parts, kept = list[str](), list[str](), 0
    for prefix, word, kind, start, end in _unread_fields(words, schema, ""):
        name = prefix + _judged(word, kind, len(unread) < _SUGGESTIONS)
        if end < start:
            line = text.count("\n", 0, start) + 1
            raise ConfigRefused(f"{source}:{line}: {name} has no value, or a bracket in it is not closed")
        unread.append(name)
        parts += (text[kept:start], re.sub(r"[^\n]", " ", text[start:end]))
        kept = end
    return "".join((*parts, text[kept:])), unread


def _unread_fields(words: Words, kind: Descriptor, prefix: str) -> Iterator[tuple[str, str, Descriptor, int, int]]:
    """Each unknown field up to the closing bracket: the path of its parent, its name, the parent's kind, start and end.

    A word followed by a colon or an opening bracket is a field's name: neither can follow a value.
    """
    inner, path = None, ""
    for (word, end), (following, _) in words:
        if word in ("}", ">"):
            return
        if word in ("{", "<") and inner:
            yield from _unread_fields(words, inner, path)
        elif word.isidentifier() and following in (":", "{", "<", "["):
            field = kind.fields_by_name.get(word)
            if field:
                inner, path = field.message_type, f"{prefix}{word}."
            else:
                yield prefix, word, kind, end - len(word), _skip_value(words)


def _skip_value(words: Words) -> int:
    """Skip a field's value and the separator after it; return the position after them, or -1 if the value does not end."""
    depth = 0
    for (word, end), (following, _) in words:
        depth += (word in ("{", "<", "[")) - (word in ("}", ">", "]"))
        if depth <= 0 and word != ":" and not following.startswith((",", ";", '"', "'")):
            return end
    return -1


def _check_count(document: object) -> None:
    """Raise ValueError for a document with more than MOST_VALUES values."""
    count, left = 0, [document]
    while left:
        value = left.pop()
        count += 1
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        if count + len(left) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values, objects and arrays included; expected at most so many")


def _judged(name: str, kind: Descriptor, suggest: bool) -> str:
    """The name of an unknown field and, in parentheses, what is wrong with it; with a suggestion if `suggest`."""
    near = get_close_matches(name, list(kind.fields_by_name), n=1) if suggest else None
    return f"{short(name)} ({f'did you mean {near[0]}?' if near else 'there is no such field'})"


def _known(document: object, kind: Descriptor, path: str, unread: list[str]) -> dict[str, Any]:
    """The object without unknown fields, whose names are appended to `unread`. Raises ValueError for anything but an object."""
    if not isinstance(document, dict):
        raise ValueError(_mistaken(path, document, "an object"))
    fields = _fields(kind)
    where = re.sub(r"\[\d+\]", "", path) + "." * bool(path)
    for name in document:
        if name not in fields:
            unread.append(where + _judged(name, kind, len(unread) < _SUGGESTIONS))
    values = {name: value for name, value in document.items() if name in fields and value is not None}
    for name, field in fields.items():
        if name != field.name and name in values and field.name in values:
            raise ValueError(f"{path}{path and '.'}{name}: given beside {field.name}, which is the same; expected one of them")
    return {name: _known_field(value, fields[name], f"{path}{path and '.'}{name}", unread) for name, value in values.items()}


@cache
def _fields(kind: Descriptor) -> dict[str, FieldDescriptor]:
    """The fields of a message by both names that they may have in JSON."""
    return {name: field for field in kind.fields for name in (field.name, field.json_name)}


def _known_field(value: object, field: FieldDescriptor, path: str, unread: list[str]) -> Any:
    if field.message_type and field.message_type.GetOptions().map_entry:
        return _known_map(value, field.message_type.fields_by_name["value"], path, unread)
    if field.has_presence:
        return _known_value(value, field, path, unread)
    if not isinstance(value, list):
        raise ValueError(_mistaken(path, value, "an array"))
    return [_known_value(item, field, f"{path}[{index}]", unread) for index, item in enumerate(value)]


def _known_map(value: object, field: FieldDescriptor, path: str, unread: list[str]) -> Any:
    if not isinstance(value, dict):
        raise ValueError(_mistaken(path, value, "an object"))
    return {key: _known_value(item, field, f"{path}.{short(key)}", unread) for key, item in value.items()}


def _known_value(value: object, field: FieldDescriptor, path: str, unread: list[str]) -> Any:
    if field.message_type:
        return _known(value, field.message_type, path, unread)
    if field.enum_type and value not in list(field.enum_type.values_by_name):
        names = ", ".join(field.enum_type.values_by_name)
        is_type = field.enum_type.name == "DataType"
        raise ValueError(_mistaken(path, value, "a data type such as TYPE_FP32" if is_type else f"one of {names}"))
    if field.type == field.TYPE_STRING and not isinstance(value, str):
        raise ValueError(_mistaken(path, value, "a string"))
    if field.type == field.TYPE_BOOL:
        if not isinstance(value, bool):
            raise ValueError(_mistaken(path, value, "true or false"))
        return value
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        if type(value) not in (int, float):
            raise ValueError(_mistaken(path, value, "a number"))
    elif field.cpp_type != field.CPPTYPE_STRING and not field.enum_type and not _is_integer(value):
        raise ValueError(_mistaken(path, value, "an integer"))
    return value


def _is_integer(value: object) -> bool:
    """Whether this is an integer in protobuf's JSON, which writes large ones as strings."""
    return type(value) is int or (isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value, re.ASCII) is not None)


def _mistaken(path: str, value: object, expected: str) -> str:
    return f"{path}{path and ': '}{show(value)}; expected {expected}"
