"""What is wrong with bytes that are no JSON, in words: what was found, where, and what to send instead.

Made only where a request is refused, and never by reading all of it once more: it may be a megabyte.
"""

import re

from orjson import JSONDecodeError

_NO_NUMBER = re.compile(rb"[-+]?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
_NAME = re.compile(rb'"name"\s*:\s*"([^"\\]{1,40})"')
_DATA = re.compile(rb'"data"\s*:')
_SHOWN = 16
"""Bytes that a message repeats of what was found."""


def explain(data: bytes, error: JSONDecodeError, tensors: bool = True) -> str:
    """Why orjson refused these bytes with this error; `tensors` is whether binary tensors could follow them."""
    try:
        text = data.decode()
    except UnicodeDecodeError as wrong:
        found = f"{data[wrong.start]:#04x} at byte {wrong.start} is no UTF-8 ({wrong.reason})"
        return found + _after_json(data[: wrong.start])
    offset = len(text[: error.pos].encode())
    if offset == len(data):
        hint = "; Inference-Header-Content-Length, where it is sent, counts all of the JSON" if tensors else ""
        return f"{error.msg} at byte {offset}, where it ends{hint}"
    return _explain_at(data, offset, error.msg)


def _explain_at(data: bytes, offset: int, message: str) -> str:
    start = offset - (data[offset - 1 : offset] in (b"-", b"+"))  # The parser looks behind the sign of -Infinity.
    place = _place(data, start)
    if found := _NO_NUMBER.match(data, start):
        instead = ": send the tensor as binary data (parameters.binary_data_size)" if place else ""
        return f"{found[0].decode()} at byte {start}{place}; JSON has no NaN and no infinity{instead}"
    hint = _after_json(data[:offset]) if "after document" in message else ""
    return f"{message}: {_excerpt(data[offset:])} at byte {offset}{place}{hint}"


def _place(data: bytes, offset: int) -> str:
    """Which element of which input this is, if it is one. Its name is known if it stands before its data."""
    entry = data[data.rfind(b"{", 0, offset) + 1 : offset]  # Tensor data has no objects in it.
    begin = _DATA.search(entry)
    row = entry[begin.end() :] if begin else b""
    if not begin or b'"' in row or row.count(b"[") <= row.count(b"]"):  # There is another key behind it, or it has ended.
        return ""
    name = _NAME.search(entry, 0, begin.start())
    of = f"input {name[1].decode()!r}" if name else "an input"
    return f", element {row.count(b',')} in the data of {of}"


def _after_json(before: bytes) -> str:
    if b"binary_data_size" not in before:
        return ""
    return "; where binary tensors follow the JSON, the header Inference-Header-Content-Length says how long it is"


def _excerpt(data: bytes) -> str:
    """As much as helps to find it, in one line."""
    text = data[:_SHOWN].decode(errors="ignore")
    plain = "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in text)
    return plain if len(data) <= _SHOWN else f"{plain}..."
