import json
from typing import Any

import numpy as np
import pytest

from engines import DATATYPES, Signature, TensorMismatch, wire
from server.errors import TooLarge

from .messages import (
    BATCHED,
    INTEGERS,
    PAIR,
    binary,
    model,
    packed,
    refusal,
    request,
    spec,
    take,
    tensor,
)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "inputs: missing; expected an array"),
        ({"inputs": None}, "inputs: missing; expected an array"),
        ({"inputs": []}, "inputs: 'x' missing; the model takes 'x'"),
        ({"inputs": {}}, "inputs: {} is an object; expected an array"),
        ({"inputs": "x"}, 'inputs: "x" is a string; expected an array'),
        ({"inputs": [1]}, "inputs[0]: 1 is an integer; expected an object"),
        ({"inputs": [None]}, "inputs[0]: null; expected an object"),
        ({"inputs": [[]]}, "inputs[0]: [] is an array; expected an object"),
        ({"inputs": [{}]}, "inputs[0].name: missing; expected a string"),
        ({"inputs": [{"name": 1}]}, "inputs[0].name: 1 is an integer; expected a string"),
        ({"inputs": [{"name": "z"}]}, "inputs[0].name: the model has no input 'z'; it has 'x'"),
        ({"inputs": [{"name": "x"}]}, "inputs[0].datatype: missing; expected a string"),
        (request(tensor([1]), tensor([1])), "inputs[1].name: 'x' given twice; expected each input once"),
        (request(tensor([1]), tensor([1], name="z")), "inputs[1].name: the model has no input 'z'; it has 'x'"),
    ],
)
def test_unknown_missing_and_repeated_inputs_are_refused(document: Any, message: str) -> None:
    assert refusal(document) == message


def test_every_input_that_is_missing_is_named() -> None:
    assert refusal({"inputs": []}, PAIR) == "inputs: 'a', 'b' missing; the model takes 'a', 'b'"
    assert refusal(request(tensor([1, 2], "INT32", name="a")), PAIR) == "inputs: 'b' missing; the model takes 'a', 'b'"


@pytest.mark.parametrize("datatype", ["FP64", "fp32", "TYPE_FP32", "", "BYTES"])
def test_another_datatype_is_refused_with_the_models(datatype: str) -> None:
    message = refusal(request(tensor([1], datatype)))
    assert message == f"inputs[0].datatype: {json.dumps(datatype)}; expected FP32, as input 'x' is"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (None, "inputs[0].shape: missing; expected an array"),
        (1, "inputs[0].shape: 1 is an integer; expected an array"),
        ([-1], "inputs[0].shape[0]: -1; expected an integer of at least 0"),
        ([1, 1.0], "inputs[0].shape[1]: 1.0; expected an integer of at least 0"),
        ([True], "inputs[0].shape[0]: true; expected an integer of at least 0"),
        (["1"], 'inputs[0].shape[0]: "1"; expected an integer of at least 0'),
        ([None], "inputs[0].shape[0]: null; expected an integer of at least 0"),
        ([2**40], "inputs[0].shape: [1099511627776] is more than the 67108864 elements that a body could carry"),
        ([2**40, 0], "inputs[0].shape: [1099511627776, 0] is more than the 67108864 elements that a body could carry"),
        ([0, 2**40], "inputs[0].shape: [0, 1099511627776] is more than the 67108864 elements that a body could carry"),
        (
            [2**32, 2**32],
            "inputs[0].shape: [4294967296, 4294967296] is more than the 67108864 elements that a body could carry",
        ),
        ([2**64 - 1] * 64, "inputs[0].shape: [18446744073709551615, 18446744073709551... is more than"),
        ([1] * 65, "inputs[0].shape: 65 dimensions; a tensor has at most 64"),
        ([2**64 - 1] * 40_000, "inputs[0].shape: 40000 dimensions; a tensor has at most 64"),
    ],
)
@pytest.mark.parametrize("entry", [tensor([1]), binary(4)])
def test_a_shape_that_no_body_could_fill_is_refused(entry: dict[str, Any], shape: Any, message: str) -> None:
    assert refusal(request(entry | {"shape": shape}), model(), b"\0" * 4).startswith(message)


@pytest.mark.parametrize(
    ("signature", "shape", "message"),
    [
        (model("FP32", "n"), [1, 1], "input 'x': shape [1, 1] has 2 dimensions; expected 1, as in [-1]"),
        (model("FP32", "n"), [], "input 'x': shape [] has 0 dimensions; expected 1, as in [-1]"),
        (model("FP32", 3), [1], "input 'x': dimension 0 of shape [1] is 1; expected 3"),
        (BATCHED, [0, 2], "input 'x': batch of 0 in shape [0, 2]; expected 1 to 4, the model's max_batch_size"),
        (BATCHED, [5, 2], "input 'x': batch of 5 in shape [5, 2]; expected 1 to 4, the model's max_batch_size"),
    ],
)
def test_a_shape_that_the_model_does_not_take_is_a_mismatch(signature: Signature, shape: list[int], message: str) -> None:
    count = int(np.prod(shape))
    assert refusal(request(tensor([1] * count, shape=shape)), signature, kind=TensorMismatch) == message
    document = request(binary(4 * count, shape=shape))
    assert refusal(document, signature, b"\0" * 4 * count, kind=TensorMismatch) == message


def test_batches_that_differ_between_inputs_are_a_mismatch() -> None:
    signature = Signature((spec("a", "INT8", "", 1), spec("b", "INT8", "", 1)), (), max_batch=4)
    document = request(tensor([[1], [2]], "INT8", [2, 1], "a"), tensor([[1], [2], [3]], "INT8", [3, 1], "b"))
    assert refusal(document, signature, kind=TensorMismatch) == "input 'b': batch of 3, but input 'a' has 2"


def test_an_answer_that_no_memory_holds_is_too_large() -> None:
    signature = Signature((spec("a", "UINT8", "n"), spec("b", "UINT8", "m")), (spec("y", "FP64", *["n", "m"] * 4),))
    size = 1 << 12
    document = request(binary(size, "UINT8", name="a"), binary(size, "UINT8", name="b"))
    message = refusal(document, signature, b"\0" * 2 * size, kind=TooLarge)
    assert message.startswith(f"the request and its answer need {8 * size**8 + 2 * size} bytes of memory")


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_out_of_range_is_refused_for_every_integer_type(name: str) -> None:
    dtype: Any = DATATYPES[name].numpy
    info = np.iinfo(dtype)
    for beyond in (int(info.min) - 1, int(info.max) + 1, 1.0):
        assert refusal(request(tensor([0, beyond], name)), model(name)).startswith("inputs[0].data[1]: ")


@pytest.mark.parametrize(
    ("datatype", "data", "message"),
    [
        ("INT32", [1.5], "inputs[0].data[0]: 1.5 is a number; expected an integer for INT32"),
        ("INT32", [1, True], "inputs[0].data[1]: true is a boolean; expected an integer for INT32"),
        ("FP32", [1, False], "inputs[0].data[1]: false is a boolean; expected a number for FP32"),
        ("FP32", [None], "inputs[0].data[0]: null; expected a number for FP32"),
        ("FP32", ["1"], 'inputs[0].data[0]: "1" is a string; expected a number for FP32'),
        ("FP32", [1e39], "inputs[0].data[0]: 1e+39 is out of range for FP32 (-3.40"),
        ("BOOL", [1], "inputs[0].data[0]: 1 is an integer; expected true or false for BOOL"),
        ("BYTES", [1], "inputs[0].data[0]: 1 is an integer; expected a string for BYTES"),
        ("BYTES", [["a"]], 'inputs[0].data[0]: ["a"] is an array; expected a string for BYTES'),
        ("FP16", [1.0], "inputs[0].data: FP16 has no JSON form; send it as a binary tensor"),
        ("BF16", [1.0], "inputs[0].data: BF16 has no JSON form; send it as a binary tensor"),
        ("FP32", 1, "inputs[0].data: 1 is an integer; expected an array"),
        ("FP32", "ab", 'inputs[0].data: "ab" is a string; expected an array'),
        ("FP32", {}, "inputs[0].data: {} is an object; expected an array"),
    ],
)
def test_invalid_element_is_refused_with_its_path(datatype: str, data: Any, message: str) -> None:
    length = len(data) if isinstance(data, list) else 1
    document = request(tensor(data, datatype, [length]), outputs=[{"name": "y", "parameters": {"binary_data": True}}])
    assert refusal(document, model(datatype)).startswith(message)


@pytest.mark.parametrize(
    ("data", "shape", "message"),
    [
        ([[1, 2], [3]], [2, 2], "inputs[0] ('x'), FP32 [2, 2]: data[1] is a row of 1; the shape asks for a row of 2 there"),
        ([1, 2, 3], [2, 2], "inputs[0] ('x'), FP32 [2, 2]: 3 elements in data; the shape asks for 4"),
        ([1] * 16, [1, 17], "inputs[0] ('x'), FP32 [1, 17]: 16 elements in data; the shape asks for 17"),
        ([1], [2**20, 64], "inputs[0] ('x'), FP32 [1048576, 64]: 1 element in data; the shape asks for 67108864"),
    ],
)
def test_data_of_another_shape_is_refused(data: list[Any], shape: list[int], message: str) -> None:
    assert refusal(request(tensor(data, shape=shape)), model("FP32", "n", "m")).startswith(message)


def test_input_needs_exactly_one_of_data_and_binary_data_size() -> None:
    message = refusal(request(tensor([1.0], binary_data_size=4)), model(), b"\0" * 4)
    assert message == "inputs[0].data: given; expected either this or parameters.binary_data_size"
    message = refusal(request({"name": "x", "datatype": "FP32", "shape": [1]}))
    assert message == "inputs[0].data: missing; expected an array, or parameters.binary_data_size"


@pytest.mark.parametrize(
    ("size", "what"), [(-4, "-4"), (4.0, "4.0 is a number"), (True, "true is a boolean"), ("4", '"4" is a string')]
)
def test_invalid_binary_data_size_is_refused(size: Any, what: str) -> None:
    message = refusal(request(binary(size, shape=[1])), model(), b"\0" * 4)
    assert message == f"inputs[0].parameters.binary_data_size: {what}; expected an integer of at least 0"


@pytest.mark.parametrize("size", [0, 3, 5, 8, 2**63])
def test_binary_data_size_must_match_the_shape(size: int) -> None:
    message = refusal(request(binary(size, shape=[1])), model(), b"\0" * 8)
    assert message == f"inputs[0] ('x'), FP32 [1]: parameters.binary_data_size is {size}; the shape asks for 4"


def test_fewer_bytes_than_declared_are_refused() -> None:
    message = refusal(request(binary(8)), model(), b"\0" * 7)
    assert message == "inputs[0].parameters.binary_data_size: 8, but 7 bytes of the body remain"


def test_binary_tensor_without_the_header_length_mentions_the_header() -> None:
    message = refusal(request(binary(8)), model())
    assert message == (
        "inputs[0].parameters.binary_data_size: 8, but 0 bytes of the body remain, "
        "which without the header Inference-Header-Content-Length is all JSON"
    )


def test_more_bytes_than_declared_are_refused() -> None:
    message = "the body has {} more than its JSON and parameters.binary_data_size of its inputs say"
    assert refusal(request(binary(8)), model(), b"\0" * 9) == message.format("1 byte")
    assert refusal(request(tensor([1])), model(), b"\0\0") == message.format("2 bytes")


@pytest.mark.parametrize(
    ("data", "count", "message"),
    [
        (b"\x04\0\0\0abc", 1, "element 0 claims 4 bytes, but 3 are left"),
        (b"\xff\xff\xff\xff", 1, "element 0 claims 4294967295 bytes, but 0 are left"),
        (b"\x01\0\0", 1, "element 0 of 1 has no length: the data ends at byte 3"),
        (packed("a"), 2, "element 1 of 2 has no length: the data ends at byte 5"),
        (packed("a", "b"), 1, "5 bytes left after 1 elements"),
        (packed("a"), 0, "5 bytes left after 0 elements"),
    ],
)
def test_bytes_without_the_lengths_of_elements_are_refused(data: bytes, count: int, message: str) -> None:
    expected = f"inputs[0] ('x'), BYTES [{count}]: {message}"
    assert refusal(request(binary(len(data), "BYTES", [count])), model("BYTES"), data) == expected


def test_elements_may_be_any_bytes() -> None:
    data = wire.pack([b"\xff", b"", b"\0", "é".encode(), b"\xc3"])
    assert take(request(binary(len(data), "BYTES", [5])), model("BYTES"), data).tensors == (((5,), data),)


@pytest.mark.parametrize("data", [b"\x02", b"\0\xff", b"\x01\x01\x80"])
def test_a_byte_other_than_0_and_1_is_no_bool(data: bytes) -> None:
    message = refusal(request(binary(len(data), "BOOL")), model("BOOL"), data)
    shape = f"inputs[0] ('x'), BOOL [{len(data)}]"
    assert message == f"{shape}: bytes other than 0 and 1 in its binary data; expected one of them for each element"


def test_half_precision_comes_in_and_goes_out_as_bytes() -> None:
    document = request(binary(4, "BF16"), parameters={"binary_data_output": True})
    assert take(document, model("BF16"), b"abcd").tensors == (((2,), b"abcd"),)
