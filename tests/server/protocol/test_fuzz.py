import json
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engines import Signature, TensorMismatch
from server.errors import RequestError

from .messages import (
    BATCHED,
    PAIR,
    binary,
    body_of,
    floats,
    model,
    request,
    take_bytes,
    tensor,
)

ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["name", "data", "shape", "parameters"]) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = ("id", "inputs", "outputs", "parameters", "name", "shape", "datatype", "data", "binary_data_size", "timeout")
MODELS = st.sampled_from([model(), PAIR, BATCHED, model("BYTES"), model("BOOL", "n", 2), model("UINT64", 1), model("FP16")])
VALID = request(
    {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [[1.0, 2.0]], "parameters": {"a": 1}},
    id="1",
    parameters={"timeout": 5, "priority": 1, "binary_data_output": False},
    outputs=[{"name": "y", "parameters": {"binary_data": True}}],
)


def take_or_refuse(body: bytes, header_length: int | None, signature: Signature) -> None:
    with suppress(RequestError, TensorMismatch):
        take_bytes(body, header_length, signature)


@given(st.dictionaries(st.sampled_from(KEYS), ANY) | ANY, MODELS)
def test_any_document_is_taken_or_refused(document: Any, signature: Signature) -> None:
    take_or_refuse(body_of(document), None, signature)


@given(st.data(), MODELS)
def test_any_change_of_a_good_document_is_taken_or_refused(data: st.DataObject, signature: Signature) -> None:
    document = json.loads(json.dumps(VALID))
    for _ in range(data.draw(st.integers(1, 3))):
        parent = document
        while True:
            key = data.draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
            if not isinstance(parent[key], dict | list) or not parent[key] or data.draw(st.booleans()):
                break
            parent = parent[key]
        parent[key] = data.draw(ANY | st.sampled_from([tensor([1], "FP32"), [1, 2], [[1, 2]], "BYTES", -1, 0]))
    take_or_refuse(body_of(document), None, signature)


@given(st.binary(max_size=64), st.none() | st.integers(0, 80), MODELS)
def test_any_bytes_are_taken_or_refused(body: bytes, header_length: int | None, signature: Signature) -> None:
    take_or_refuse(body, header_length, signature)


@given(st.data())
def test_any_change_of_good_bytes_is_taken_or_refused(data: st.DataObject) -> None:
    head = body_of(request(binary(8, shape=[1, 2])))
    body = bytearray(head + floats([1, 2]))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"[", b"]", b":", b"9", b"-", b'"'])
        )
    take_or_refuse(bytes(body), len(head) + data.draw(st.integers(-2, 2)), BATCHED)
