"""Typed values and raw bytes of gRPC into slots, as binary tensors after JSON get there."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import DATATYPES, Signature, wire
from engines.memory import view
from server.errors import BadRequest, TooLarge
from server.protocol.request import Limits, decode_body
from server.protocol.typed_tensors import FIELDS, TensorsBody, Typed
from tests.memory import slot_of

from .messages import LIMITS, model, request

KINDS: dict[str, Any] = {
    "bool_contents": np.bool_,
    "int_contents": np.int32,
    "int64_contents": np.int64,
    "uint_contents": np.uint32,
    "uint64_contents": np.uint64,
    "fp32_contents": np.float32,
    "fp64_contents": np.float64,
}
BINARY = {"binary_data_output": True}


def entry(data: Any, datatype: str, shape: list[int]) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape, "parameters": {}, "data": data}


def taken(signature: Signature, *inputs: Any, limits: Limits = LIMITS) -> list[bytes]:
    """The tensors as the worker finds them."""
    slot = slot_of()
    decoded = decode_body(TensorsBody(request(*inputs, parameters=BINARY)), signature, slot, limits)
    found, _ = slot.inputs(signature, decoded.shapes, slot.capacity)
    return [bytes(view(tensor.address, tensor.nbytes)) for tensor in found]


def refusal(signature: Signature, *inputs: Any, kind: type[Exception] = BadRequest, limits: Limits = LIMITS) -> str:
    with pytest.raises(kind) as refused:
        taken(signature, *inputs, limits=limits)
    return str(refused.value)


@pytest.mark.parametrize("datatype", [name for name in FIELDS if name != "BYTES"])
@given(data=st.data())
def test_typed_values_arrive_in_the_inputs_type(datatype: str, data: st.DataObject) -> None:
    kind = DATATYPES[datatype]
    numpy: Any = kind.numpy
    if kind.kind in ("int", "uint"):
        limits = np.iinfo(numpy)
        values: Any = st.integers(int(limits.min), int(limits.max))
    else:
        values = st.booleans() if kind.kind == "bool" else st.floats(width=32)
    given_values = data.draw(st.lists(values, max_size=6))
    typed = Typed(FIELDS[datatype], np.array(given_values, KINDS[FIELDS[datatype]]))
    assert taken(model(datatype), entry(typed, datatype, [len(given_values)])) == [np.array(given_values, numpy).tobytes()]


@given(st.lists(st.binary(max_size=5), max_size=6))
def test_texts_arrive_in_wire_form_from_both(texts: list[bytes]) -> None:
    signature, shape = model("BYTES"), [len(texts)]
    raw = wire.pack(texts)
    assert taken(signature, entry(Typed("bytes_contents", texts), "BYTES", shape)) == [raw]
    assert taken(signature, entry(memoryview(raw), "BYTES", shape)) == [raw]


@pytest.mark.parametrize(
    ("datatype", "outside"), [("INT8", 128), ("INT8", -129), ("INT16", 2**15), ("UINT8", 256), ("UINT16", 2**16)]
)
def test_a_value_beyond_the_inputs_type_is_named(datatype: str, outside: int) -> None:
    field = FIELDS[datatype]
    typed = Typed(field, np.array([1, outside, outside], KINDS[field]))
    limits = np.iinfo(DATATYPES[datatype].numpy)  # type: ignore[type-var]
    expected = f"inputs[0].contents.{field}[1]: {outside} is out of range for {datatype} ({limits.min} to {limits.max})"
    assert refusal(model(datatype), entry(typed, datatype, [3])) == expected


@pytest.mark.parametrize(
    ("data", "datatype", "text"),
    [
        (memoryview(bytes(7)), "FP32", "inputs[0] ('x'), FP32 [2]: 7 bytes in raw_input_contents; the shape asks for 8"),
        (memoryview(b"\x02\x01"), "BOOL", "inputs[0] ('x'), BOOL [2]: bytes other than 0 and 1 in its binary data"),
        (memoryview(b"\x01"), "BYTES", "inputs[0] ('x'), BYTES [2]: element 0 of 2 has no length"),
        (None, "FP32", "inputs[0].contents: missing; expected fp32_contents, or the tensor in raw_input_contents"),
        (None, "FP16", "inputs[0].contents: FP16 has no typed form; send it in raw_input_contents"),
        (
            Typed("int_contents", np.zeros(2, np.int32)),
            "FP32",
            "inputs[0].contents.int_contents: given; expected fp32_contents",
        ),
        (
            Typed("fp32_contents", np.zeros(3, np.float32)),
            "FP32",
            "inputs[0] ('x'), FP32 [2]: 3 elements in contents.fp32_contents; the shape asks for 2",
        ),
    ],
)
def test_what_is_wrong_with_a_tensor_is_said(data: Any, datatype: str, text: str) -> None:
    assert refusal(model(datatype), entry(data, datatype, [2])).startswith(text)


def test_texts_of_one_request_are_limited() -> None:
    limits = Limits(json=1 << 20, elements=1 << 20, texts=1)
    text = refusal(model("BYTES"), entry(Typed("bytes_contents", [b"", b""]), "BYTES", [2]), kind=TooLarge, limits=limits)
    assert text == "inputs[0].shape: 2 elements of BYTES in one request; the limit is 1 (server.max_string_elements)"


def test_shared_memory_is_refused_before_missing_contents_are() -> None:
    given_entry = entry(None, "FP32", [2]) | {"parameters": {"shared_memory_region": "mine"}}
    assert "shared memory is not served" in refusal(model(), given_entry)
