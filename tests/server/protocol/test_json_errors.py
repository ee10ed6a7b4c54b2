"""Error texts for invalid JSON: what was found, where, and what to send instead."""

import json
from typing import Any

import pytest

from server.errors import BadRequest
from server.protocol.json_document import parse

from .messages import refusal, request, tensor

INSTEAD = "JSON has no NaN and no infinity: send the tensor as binary data (parameters.binary_data_size)"


def message_of(body: bytes) -> str:
    with pytest.raises(BadRequest, match=r"^the request body is not JSON: ") as caught:
        parse(body)
    return str(caught.value).removeprefix("the request body is not JSON: ")


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "nan", "-nan", "inf", "-inf", "INF"])
def test_nan_and_infinity_are_named_with_position_and_advice(literal: str) -> None:
    text = json.dumps(request(tensor([0.5, "HERE", 1], name="rate"))).replace('"HERE"', literal)
    where = f"{literal} at byte {text.index(literal)}, element 1 in the data of input 'rate'"
    assert refusal(text.encode()) == f"the request body is not JSON: {where}; {INSTEAD}"


@pytest.mark.parametrize(
    "entry",
    [
        {"parameters": {}, "data": [float("nan")]},
        {"data": [float("nan")], "name": "x"},
        {"name": 'a"b', "data": [float("nan")]},
    ],
)
def test_input_name_is_not_guessed(entry: dict[str, Any]) -> None:
    body = json.dumps(request(tensor([1], name="other"), entry)).encode()
    assert message_of(body) == f"NaN at byte {body.index(b'NaN')}, element 0 in the data of an input; {INSTEAD}"


@pytest.mark.parametrize(
    "document",
    [
        request(tensor([1]), parameters={"timeout": float("nan")}),
        request(tensor([1]), id=float("nan")),
        request({"name": "x", "data": [1], "shape": [float("nan")]}),
        {"acme": float("nan")},
    ],
)
def test_errors_outside_tensors_do_not_mention_tensors(document: Any) -> None:
    body = json.dumps(document).encode()
    assert message_of(body) == f"NaN at byte {body.index(b'NaN')}; JSON has no NaN and no infinity"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"a": None}', "unexpected character, expected a JSON value: None} at byte 6"),
        (b"{'a': 1}", "unexpected character, expected a string key: 'a': 1} at byte 1"),
        (b'{"a": 1} {}', "unexpected content after document: {} at byte 9"),
        (b'{"a": 1e999}', "number is infinity when parsed as double: 1e999} at byte 6"),
        ('{"é": nobody knows}'.encode(), "invalid literal, expected 'null': nobody knows} at byte 7"),
        (b'{"a": "\x01"}', 'unexpected control character in string: \\u0001"} at byte 7'),
        (b"model=m&x=1", "unexpected character, expected a JSON value: model=m&x=1 at byte 0"),
        (b'{"data": [1], None}', "unexpected character, expected a string key: None} at byte 14"),
    ],
)
def test_unexpected_text_is_quoted(body: bytes, what: str) -> None:
    assert message_of(body) == what


@pytest.mark.parametrize("body", [b'{"inputs": [', b'{"id": "a'])
def test_truncated_json_mentions_the_header_length(body: bytes) -> None:
    why = f"unexpected end of data at byte {len(body)}, where it ends"
    assert message_of(body) == f"{why}; Inference-Header-Content-Length, where it is sent, counts all of the JSON"
    with pytest.raises(BadRequest) as refused:
        parse(body, tensors=False)
    assert str(refused.value) == f"the request body is not JSON: {why}"


def test_invalid_utf_8_is_named_with_its_offset() -> None:
    assert message_of('{"é": "'.encode() + b'\xff"}') == "0xff at byte 8 is not UTF-8 (invalid start byte)"


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        (b"\x00\x00\x80\xbf", "0x80 at byte {} is not UTF-8 (invalid start byte)"),
        (b"abcd", "unexpected content after document: abcd at byte {}"),
    ],
)
def test_binary_tensors_without_the_header_length_mention_the_header(tensors: bytes, what: str) -> None:
    head = b'{"inputs": [{"parameters": {"binary_data_size": 4}}]}'
    at = len(head) + 2 * (tensors[0] == 0)
    hint = "; where binary tensors follow the JSON, the header Inference-Header-Content-Length says how long it is"
    assert message_of(head + tensors) == what.format(at) + hint
