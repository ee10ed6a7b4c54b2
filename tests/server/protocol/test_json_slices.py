"""Large JSON in time slices gives the same result as parsed at once."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import TensorMismatch
from server.errors import RequestError
from server.link.messages import Extent
from server.protocol.json_document import Object
from server.protocol.json_slices import ELEMENTS, SLICE, extract_row, parse_row, parse_slices
from server.protocol.request import decode
from server.protocol.response import encode, is_long, write_long
from server.protocol.time_slices import Steps
from tests.memory import roomy

from .messages import LIMITS, body_of, model, request, tensor

COUNT = SLICE // 2


def finish(steps: Steps[Any]) -> tuple[int, Any]:
    """The number of steps, and the result."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1


def outcome(body: bytes, datatype: str, in_slices: bool) -> Any:
    """The request and its tensor, or the refusal."""
    slot, signature = roomy(), model(datatype)
    try:
        document = finish(parse_slices(body, extract_row(body)))[1] if in_slices else None
        taken = decode(body, None, signature, slot, LIMITS, document)
    except (RequestError, TensorMismatch) as error:
        return type(error), str(error)
    return taken, bytes(slot.view[: signature.inputs[0].nbytes(taken.shapes[0])])


def same(document: Any, datatype: str) -> bool:
    """Whether it is parsed in slices; the result must be the same as without."""
    body = body_of(document)
    assert outcome(body, datatype, True) == outcome(body, datatype, False)
    row = extract_row(body)
    return row is not None and finish(parse_row(row))[1]


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("FP32", [0.1, 1e-45, -3.4e38, 1, -0.0, 0, 2**63]),
        ("FP64", [0.1, 2**53 + 1, 1e308]),
        ("INT64", [2**63 - 1, -(2**63), 2**53 + 1]),
        ("UINT64", [2**64 - 1, 0]),
        ("UINT8", [255, 0]),
        ("BOOL", [True, False]),
    ],
)
def test_sliced_numbers_are_exact(datatype: str, values: list[Any]) -> None:
    assert same(request(tensor(values * (COUNT // len(values)), datatype), id="a", parameters={"timeout": 7}), datatype)


@pytest.mark.parametrize("odd", [None, "1", "]", True, [1], {}, 1e39, 2**70, 0.5, "\0", '"data":['])
@pytest.mark.parametrize("place", [0, COUNT // 2, COUNT])
@pytest.mark.parametrize("datatype", ["FP32", "INT32"])
def test_errors_in_slices_are_the_same_as_without(odd: Any, place: int, datatype: str) -> None:
    values: list[Any] = [1] * COUNT
    values.insert(place, odd)
    same(request(tensor(values, datatype)), datatype)


LONG = ", ".join(["1.5"] * COUNT)


@pytest.mark.parametrize(
    "text",
    [
        "[" + "1.5," * (SLICE // 4 + 1) + "]",
        f"[{LONG},]",
        f"[{LONG},,1]",
        f"[,{LONG}]",
        f"[{LONG} 1]",
        f"[{LONG}",
        f"[[{LONG}]]",
        f"[{LONG}]]",
    ],
)
def test_malformed_row_is_refused_as_without_slices(text: str) -> None:
    body = body_of(request(tensor(["ROW"], "FP32", [COUNT]))).replace(b'["ROW"]', text.encode())
    assert not same(body, "FP32")


def entry(**fields: Any) -> Object:
    return tensor([1.5] * COUNT) | fields


@pytest.mark.parametrize(
    "document",
    [
        request(tensor([1.5] * COUNT, shape=[COUNT - 1])),
        request(tensor([1.5] * COUNT, "BYTES")),
        request(tensor([1.5] * COUNT, "FP16")),
        request(entry(datatype=5)),
        request(entry(name="\0")),
        request(entry(), id="\0"),
        request(tensor("\0", shape=[1]), entry(name="y")),
        request(entry(), entry()),
        request(entry(), 5, parameters=[]),
        request(entry(), parameters={"timeout": -1}),
        {"inputs": 5, "data": [1.5] * COUNT},
        request(parameters={"data": [1.5] * COUNT}),
        request(tensor([1.5]), data=[1.5] * COUNT),
        request(tensor([1.5], name='\\"data":[')),
        json.dumps(request(entry()))[:-1].encode() + b', "inputs": []}',
        json.dumps(request(entry())).encode() + b"]",
    ],
)
@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BYTES"])
def test_any_document_gives_the_same_result_as_without_slices(document: Any, datatype: str) -> None:
    same(document, datatype)


@pytest.mark.parametrize(("value", "seconds"), [(1500, 0.0015), (0, None), (-1, None), (True, None), ("1", None), (None, None)])
def test_the_timeout_is_known_before_the_numbers_are(value: Any, seconds: float | None) -> None:
    row = extract_row(body_of(request(entry(), parameters={} if value is None else {"timeout": value})))
    assert row
    assert row.timeout == seconds


def test_invalid_parameters_have_no_timeout() -> None:
    row = extract_row(body_of(request(entry(), parameters=[1])))
    assert row
    assert row.timeout is None


@given(st.integers(ELEMENTS + 1, 3 * ELEMENTS), st.sampled_from(["FP32", "INT8", "BOOL", "FP64"]))
def test_answer_written_in_slices_has_the_same_bytes(count: int, datatype: str) -> None:
    signature, slot = model(datatype), roomy()
    values = np.random.default_rng(count).normal(size=count) if datatype.startswith("FP") else np.arange(count) % 2
    if datatype.startswith("FP"):
        values[:: ELEMENTS // 3], values[1 :: ELEMENTS // 2], values[2::ELEMENTS] = np.nan, np.inf, -np.inf
    data = values.astype(signature.inputs[0].datatype.numpy).tobytes()
    slot.view[: len(data)] = data
    taken, extents = (
        decode(
            body_of(request(tensor([1], datatype) if datatype != "BOOL" else tensor([True], datatype))),
            None,
            signature,
            roomy(),
            LIMITS,
        ),
        [Extent((count,), 0, len(data))],
    )
    assert is_long(taken, signature, extents)
    for nonfinite in ("literal", "null"):
        steps, written = finish(write_long(taken, signature, slot, extents, nonfinite))
        assert steps > 1
        sliced = encode("m", "1", taken, signature, slot, extents, written, nonfinite)
        assert sliced == encode("m", "1", taken, signature, slot, extents, nonfinite=nonfinite)
        assert json.loads(sliced.body)["outputs"][0]["shape"] == [count]
