"""ModelInferRequests from bytes into documents and tensors; against protobuf's own parser."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import BadRequest, TooLarge
from server.grpc.messages import ModelInferRequest
from server.grpc.request import document, parse
from server.protocol.request import Limits
from server.protocol.typed_tensors import FIELDS, Typed

LIMITS = Limits(json=1 << 16, elements=1 << 20)


def message(**fields: Any) -> Any:
    made = ModelInferRequest(model_name="m", **fields)
    made.inputs.add(name="x", datatype="FP32", shape=[2])
    return made


def read(data: bytes, limits: Limits = LIMITS, taken: list[None] | None = None) -> Any:
    """The document of a message; `taken` gets an element for each step."""
    results: list[Any] = []

    def run() -> Any:
        results.append((yield from document(parse(data, limits))))

    steps = list(run())
    if taken is not None:
        taken += steps
    return results[0]


def refusal(data: bytes) -> str:
    """Why a message is refused; empty if it is not."""
    try:
        parse(data, LIMITS)
    except BadRequest as error:
        return str(error)
    return ""


def field(number: int, data: bytes) -> bytes:
    """A field of bytes on the wire, with the longest form of its length."""
    length = bytes([len(data) >> (7 * index) & 127 | 128 for index in range(4)]) + bytes([len(data) >> 28])
    return bytes([number << 3 | 2]) + length + data


@given(st.lists(st.binary(max_size=300), max_size=5), st.text(max_size=9), st.integers(0, 2**40), st.data())
def test_raw_tensors_are_taken_out_wherever_they_are(raw: list[bytes], name: str, number: int, data: st.DataObject) -> None:
    made = ModelInferRequest(model_name=name, id="7")
    for index in range(len(raw)):
        made.inputs.add(name=f"x{index}", datatype="FP32", shape=[number])
    fields = [field(7, each) for each in raw]
    fields += [field(5, each.SerializeToString()) for each in made.inputs]
    fields += [field(1, name.encode()), field(3, b"7"), bytes([15 << 3]) + b"\xff\x01", b"\x79" + b"8 bytes.", b"\x7d4byt"]
    order = data.draw(st.permutations(range(len(fields))))
    parsed = parse(b"".join(fields[index] for index in order), LIMITS)
    assert [bytes(each) for each in parsed.raw] == [raw[index] for index in order if index < len(raw)]
    assert (parsed.message.model_name, parsed.message.id, len(parsed.message.inputs)) == (name, "7", len(raw))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    if why := refusal(data):
        assert why.startswith("the message ")
    else:
        assert [bytes(each) for each in parse(data, LIMITS).raw] == list(ModelInferRequest.FromString(data).raw_input_contents)


def test_a_message_that_is_cut_off_is_refused() -> None:
    whole = message(raw_input_contents=[b"12345678"]).SerializeToString()
    ends = {0, 3, len(whole) - 10, len(whole)}  # Of the fields.
    for size in range(len(whole) + 1):
        assert (size in ends) == (not refusal(whole[:size]))
        assert refusal(whole[:size]).startswith("" if size in ends else "the message is no ModelInferRequest: ")


def test_raw_tensors_are_not_copied() -> None:
    data = message(raw_input_contents=[b"12345678"]).SerializeToString()
    (raw,) = parse(data, LIMITS).raw
    assert raw.obj is data


def test_the_document_is_that_of_a_json_request() -> None:
    made = message(id="7", raw_input_contents=[b"12345678"])
    made.parameters["timeout"].int64_param = 5
    made.parameters["priority"].uint64_param = 1
    made.parameters["note"].string_param = "mine"
    made.parameters["ratio"].double_param = 0.5
    made.outputs.add(name="y").parameters["classification"].int64_param = 3
    made.outputs[0].parameters["binary_data"].bool_param = False
    assert read(made.SerializeToString()) == {
        "id": "7",
        "parameters": {"timeout": 5, "priority": 1, "note": "mine", "ratio": 0.5, "binary_data_output": True},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "parameters": {}, "data": memoryview(b"12345678")}],
        "outputs": [{"name": "y", "parameters": {"classification": 3}}],
    }


@pytest.mark.parametrize("where", ["", "inputs[0].", "outputs[0]."])
def test_a_parameter_without_a_value_is_refused(where: str) -> None:
    made = message(raw_input_contents=[b"12345678"])
    made.outputs.add(name="y")
    of = {"": made, "inputs[0].": made.inputs[0], "outputs[0].": made.outputs[0]}[where]
    of.parameters["priority"].SetInParent()
    with pytest.raises(BadRequest, match=re.escape(f"{where}parameters.priority: no value; expected one such as")):
        read(made.SerializeToString())


@pytest.mark.parametrize(("datatype", "name"), FIELDS.items())
def test_typed_values_are_read_from_their_field(datatype: str, name: str) -> None:
    made = message()
    values: list[Any] = [b"a", b"\xff"] if datatype == "BYTES" else [1, 0]
    getattr(made.inputs[0].contents, name).extend(values)
    given = read(made.SerializeToString())["inputs"][0]["data"]
    assert isinstance(given, Typed)
    assert (given.field, list(given.values)) == (name, values)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.raw_input_contents.extend([b"", b""]), "raw_input_contents: 2 given for 1 input; expected one for each"),
        (
            lambda m: (m.raw_input_contents.append(b""), m.inputs[0].contents.fp32_contents.append(1)),
            "inputs[0].contents: given; expected nothing, as raw_input_contents has the tensors",
        ),
        (
            lambda m: (m.inputs[0].contents.int_contents.append(1), m.inputs[0].contents.fp32_contents.append(1)),
            "inputs[0].contents: int_contents and fp32_contents given; expected one of them",
        ),
    ],
)
def test_tensors_given_twice_or_not_for_each_are_refused(change: Any, text: str) -> None:
    made = message()
    change(made)
    with pytest.raises(BadRequest) as refused:
        read(made.SerializeToString())
    assert str(refused.value).startswith(text)


def test_all_but_raw_tensors_counts_against_the_limit_of_json() -> None:
    made = message(raw_input_contents=[bytes(1 << 20)])
    assert parse(made.SerializeToString(), LIMITS).raw
    made = message()
    made.inputs[0].contents.fp32_contents.extend([0.0] * (1 << 14))
    with pytest.raises(TooLarge, match=r"bytes besides raw_input_contents; the limit is 65536 \(server.max_json_tensor\)"):
        parse(made.SerializeToString(), LIMITS)


def test_a_flood_of_small_fields_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(BadRequest, match="more than 1024 parameters, inputs, outputs and tensors"):
        parse(b"\x2a\x00" * 10_000, LIMITS)


def test_many_typed_values_are_converted_in_steps() -> None:
    made = message()
    values = np.arange(40_000, dtype=np.float32)
    made.inputs[0].contents.fp32_contents.extend(values.tolist())
    parsed = parse(made.SerializeToString(), Limits(json=1 << 20, elements=1 << 20))
    assert parsed.long
    taken: list[None] = []
    given = read(made.SerializeToString(), Limits(json=1 << 20, elements=1 << 20), taken)["inputs"][0]["data"]
    assert given.values.tobytes() == values.tobytes()
    assert len(taken) == 5
