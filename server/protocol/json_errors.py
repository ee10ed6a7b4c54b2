"""Explains why bytes are not valid JSON: what was found, at which offset, and what to send instead.

Used only for refused requests. The document, which may have a megabyte, is never parsed a second time.
"""

import re

from orjson import JSONDecodeError

_NONFINITE = re.compile(rb"[-+]?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
_NAME = re.compile(rb'"name"\s*:\s*"([^"\\]{1,40})"')
_DATA = re.compile(rb'"data"\s*:')
_SHOWN = 16
"""Bytes of the document that a message quotes."""


def explain(data: bytes, error: JSONDecodeError, tensors: bool = True) -> str:
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
