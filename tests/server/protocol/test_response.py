import json
import math
from typing import Any

import numpy as np
import pytest

from engines import DATATYPES, Signature
from server.errors import BadRequest
from server.link.messages import Extent
from server.protocol.request import InferRequest, RequestedOutput
from server.protocol.response import InferResponse, encode
from tests.memory import roomy

from .messages import INTEGERS, floats, packed, spec

OUTPUTS = (spec("y", "FP32", "n"), spec("t", "BYTES", "n"), spec("b", "BOOL", "n"), spec("h", "FP16", "n"))
HALVES = np.array([1, 2], "<f2").tobytes()
TENSORS = (((2,), floats([1, 2])), ((2,), packed("a", "é")), ((2,), b"\x01\0"), ((2,), HALVES))


def answer(
    *wanted: tuple[int, bool], outputs: tuple[tuple[tuple[int, ...], bytes], ...] = TENSORS, id: str | None = None
) -> InferResponse:
    """The answer to a request for these outputs of a model that left these tensors in the slot."""
    slot, extents, end = roomy(), [], 0
    for shape, data in outputs:
        slot.view[end : end + len(data)] = data
        extents.append(Extent(shape, end, len(data)))
        end += 64
    asked = InferRequest(id, (), tuple(RequestedOutput(position, binary) for position, binary in wanted), 0, None)
    return encode("m", "2", asked, Signature((), OUTPUTS), slot, extents)


def document(response: InferResponse) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(response.body[: response.header_length])
    return parsed


@pytest.mark.parametrize(
    ("nonfinite", "data"), [("literal", b"[1.0,NaN,Infinity,-Infinity,2.5,NaN]"), ("null", b"[1.0,null,null,null,2.5,null]")]
)
@pytest.mark.parametrize("name", ["FP32", "FP64"])
def test_nan_and_infinity_are_written_as_configured_and_are_right_in_binary(name: str, nonfinite: str, data: bytes) -> None:
    dtype: Any = DATATYPES[name].numpy
    values = np.array([1, math.nan, math.inf, -math.inf, 2.5, math.nan], dtype)
    slot = roomy()
    slot.view[: values.nbytes] = values.tobytes()
    signature, extents = Signature((), (spec("y", name, 6),)), [Extent((6,), 0, values.nbytes)]
    for binary, expected in ((False, data), (True, values.tobytes())):
        asked = InferRequest(None, (), (RequestedOutput(0, binary),), 0, None)
        assert expected in encode("m", "1", asked, signature, slot, extents, nonfinite=nonfinite).body


def test_bytes_that_are_not_utf_8_are_refused_in_json_and_answered_in_binary() -> None:
    data = packed("a") + b"\x01\0\0\0\xff"
    outputs = (((0,), b""), ((2,), data))
    with pytest.raises(
        BadRequest, match=r"^output 't': element 1 is not UTF-8 .* ask for a binary tensor \(parameters\.binary_data_output .*"
    ):
        answer((1, False), outputs=outputs)
    response = answer((1, True), outputs=outputs)
    assert response.body[response.header_length :] == data


@pytest.mark.parametrize("name", [*INTEGERS, "FP32", "FP64"])
def test_the_limits_of_every_type_are_answered_exactly(name: str) -> None:
    dtype: Any = DATATYPES[name].numpy
    info = np.iinfo(dtype) if name in INTEGERS else np.finfo(dtype)
    values = np.array([info.min, info.max], dtype)
    slot = roomy()
    slot.view[: values.nbytes] = values.tobytes()
    asked = InferRequest(None, (), (RequestedOutput(0, binary=False),), 0, None)
    response = encode("m", "1", asked, Signature((), (spec("y", name, 2),)), slot, [Extent((2,), 0, values.nbytes)])
    np.testing.assert_array_equal(np.array(document(response)["outputs"][0]["data"], dtype), values)
