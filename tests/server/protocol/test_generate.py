"""Requests and answers of the generate extension: tensors by name, and the shapes that follow from flat arrays."""

import json
from typing import Any

import numpy as np
import pytest

from engines import Signature
from engines.memory import view
from server.errors import BadRequest, TooLarge
from server.link.messages import Extent
from server.protocol.generate import MAX_BYTES, decode, encode, event
from server.protocol.request import InferRequest, Limits
from tests.memory import roomy, slot_of

from .messages import LIMITS, floats, packed, spec

OUTPUTS = (spec("y", "FP32", "n"),)


def decoded(document: Any, *inputs: Any, limits: Limits = LIMITS) -> tuple[InferRequest, list[bytes]]:
    """The request, and the bytes of its tensors."""
    slot, signature = slot_of(), Signature(inputs, OUTPUTS)
    request = decode(json.dumps(document).encode(), signature, slot, limits)
    tensors, _ = slot.inputs(signature, request.shapes, slot.capacity)
    return request, [bytes(view(tensor.address, tensor.nbytes)) for tensor in tensors]


@pytest.mark.parametrize(
    ("dims", "count", "shape"),
    [
        ((), 1, ()),
        ((1,), 1, (1,)),
        (("n",), 3, (3,)),
        (("n",), 0, (0,)),
        (("b", "n"), 3, (1, 3)),
        (("b", 1), 3, (3, 1)),
        (("b", 2), 6, (3, 2)),
        (("b", 2, "n"), 6, (1, 2, 3)),
        ((2, 3), 6, (2, 3)),
    ],
)
def test_the_last_dimension_that_varies_takes_what_the_others_leave(
    dims: tuple[int | str, ...], count: int, shape: tuple[int, ...]
) -> None:
    values = list(range(count))
    request, tensors = decoded({"x": values}, spec("x", "FP32", *dims))
    assert request.shapes == (shape,)
    assert tensors == [floats(values)]


@pytest.mark.parametrize(("dims", "count"), [((), 2), ((2,), 1), (("n", 2), 3), ((2, 3), 5), ((1,), 0)])
def test_a_number_of_elements_that_fits_no_shape_is_refused(dims: tuple[int | str, ...], count: int) -> None:
    with pytest.raises(BadRequest, match=rf"x: {count} elements?, which cannot have the shape of input 'x'"):
        decoded({"x": list(range(count))}, spec("x", "FP32", *dims))


def test_a_value_is_an_array_of_one() -> None:
    inputs = spec("t", "BYTES", "n"), spec("b", "BOOL", 1), spec("i", "INT64", 1, 1)
    request, tensors = decoded({"t": "é", "b": True, "i": -7}, *inputs)
    assert request.shapes == ((1,), (1,), (1, 1))
    assert tensors == [packed("é"), b"\1", np.int64(-7).tobytes()]


def test_members_that_are_no_inputs_are_parameters() -> None:
    document = {"x": 1, "timeout": 2_000_000, "id": "7", "parameters": {"priority": 3}}
    for each in (document, {"x": 1, "priority": 3, "parameters": {"timeout": 2_000_000, "id": "7"}}):
        request, _ = decoded(each, spec("x", "FP32", 1))
        assert (request.timeout, request.id, request.priority) == (2.0, "7", 3)


def test_an_input_may_be_named_like_what_the_protocol_names() -> None:
    request, tensors = decoded({"id": 5, "parameters": [1]}, spec("id", "INT32", 1), spec("parameters", "INT32", "n"))
    assert request.id is None
    assert tensors == [np.int32(5).tobytes(), np.int32(1).tobytes()]


@pytest.mark.parametrize("name", ["timeout", "priority", "id"])
def test_a_parameter_given_beside_parameters_and_in_them_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=f"'{name}' given twice; expected each parameter once"):
        decoded({"x": 1, name: 1, "parameters": {name: 2}}, spec("x", "FP32", 1))


def test_a_member_given_twice_is_refused() -> None:
    with pytest.raises(BadRequest, match='the request body has the key "x" twice in one object'):
        decode(b'{"x": 1, "y": true, "x": 2}', Signature((spec("x", "FP32", 1),), OUTPUTS), slot_of(), LIMITS)


@pytest.mark.parametrize(
    ("what", "signature"),
    [
        ("input", Signature((spec("x", "FP32", 1), spec("h", "FP16", "n")), OUTPUTS)),
        ("output", Signature((), (spec("h", "FP16", "n"),))),
    ],
)
def test_a_tensor_without_a_form_in_json_is_refused_before_the_model_runs(what: str, signature: Signature) -> None:
    expected = f"^generate: {what} 'h' is FP16, which has no JSON form; use infer with binary tensors$"
    with pytest.raises(BadRequest, match=expected):
        decode(b'{"x": 1, "h": 2}', signature, slot_of(), LIMITS)


def test_long_requests_are_refused() -> None:
    signature = Signature((), OUTPUTS)
    with pytest.raises(TooLarge, match=f"the limit for generate is {MAX_BYTES}. Use infer"):
        decode(b" " * (MAX_BYTES + 1), signature, slot_of(), Limits(1 << 30, 1 << 20))
    with pytest.raises(TooLarge, match=r"the limit for generate is 9 \(server.max_json_tensor\)"):
        decode(b" " * 10, signature, slot_of(), Limits(9, 1 << 20))
    with pytest.raises(TooLarge, match=r"t: 3 elements of BYTES; the limit is 2 \(server.max_string_elements\)"):
        decoded({"t": ["a", "b", "c"]}, spec("t", "BYTES", "n"), limits=Limits(1 << 20, 1 << 20, texts=2))


def test_an_output_of_one_element_is_a_value_and_others_are_flat() -> None:
    outputs = (
        (spec("y", "FP32", "n"), (1, 1), floats([0.5])),
        (spec("z", "FP32", "n"), (2, 1), floats([1, 2])),
        (spec("t", "BYTES", "n"), (1,), packed('a"\n')),
        (spec("u", "BYTES", "n"), (2,), packed("a", "b")),
        (spec("b", "BOOL", "n"), (1,), b"\1"),
        (spec("i", "INT64", "n"), (1,), np.int64(1 << 60).tobytes()),
        (spec("none", "INT64", "n"), (0,), b""),
        (spec("bad", "FP32", "n"), (1,), floats([float("nan")])),
    )
    slot, extents, end = roomy(), [], 0
    for _, shape, data in outputs:
        slot.view[end : end + len(data)] = data
        extents.append(Extent(shape, end, len(data)))
        end += 64
    request = InferRequest("7", (), (), 0, None)
    signature = Signature((), tuple(output[0] for output in outputs))
    written = encode("m", "2", request, signature, slot, extents)
    assert json.loads(written.replace(b"NaN", b"null")) == {
        **{"model_name": "m", "model_version": "2", "id": "7", "y": 0.5, "z": [1, 2], "t": 'a"\n', "u": ["a", "b"]},
        **{"b": True, "i": 1 << 60, "none": [], "bad": None},
    }
    assert b'"bad":NaN' in written
    assert b'"bad":null' in encode("m", "2", request, signature, slot, extents, "null")
    assert event(written).count(b"\n") == 2


def test_an_output_goes_before_what_else_has_its_name() -> None:
    slot, names = roomy(), ("id", "model_name", "model_version")
    slot.view[:12] = floats([1, 2, 3])
    signature = Signature((), tuple(spec(name, "FP32", 1) for name in names))
    extents = [Extent((1,), 4 * index, 4) for index in range(3)]
    written = encode("m", "2", InferRequest("7", (), (), 0, None), signature, slot, extents)
    assert json.loads(written) == dict(zip(names, (1, 2, 3), strict=True))
