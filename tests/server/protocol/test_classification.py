"""The classification extension: the classes, their format, and how long the event loop is blocked."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from engines import DATATYPES, Signature, TensorSpec, wire
from server.errors import BadRequest
from server.link.messages import Extent
from server.protocol.classification import MAX_ELEMENTS, MAX_TEXTS, UNLABELLED, Classes, Labels, classify
from server.protocol.request import InferRequest, RequestedOutput
from server.protocol.request_cache import RequestCache
from server.protocol.response import InferResponse, encode, write_long
from tests.memory import roomy

from .messages import floats, spec
from .test_json_slices import finish

FRUIT = Labels({"y": b"fig\r\napple\n\npickle"})


def classes(values: Any, count: int, name: str = "FP32", batched: bool = False, labels: Any = ()) -> Classes:
    array = np.asarray(values) if isinstance(values, np.ndarray) else np.asarray(values, DATATYPES[name].numpy)
    return finish(classify(spec("y", name), memoryview(array.tobytes()), array.shape, count, batched, labels))[1]


def texts(values: Any, count: int, name: str = "FP32") -> list[str]:
    return [text.decode() for text in classes(values, count, name).texts]


def test_highest_values_come_first_with_their_indices() -> None:
    """The example of Triton's documentation."""
    assert texts([1, 5, 10, 4], 2, "INT32") == ["10:2", "5:1"]
    assert texts([1.1, 3.3, 0.5, 2.4], 2) == ["3.300000:1", "2.400000:3"]


def test_label_follows_the_index() -> None:
    found = classes([1, 5, 10, 4, 7], 5, "UINT8", labels=FRUIT.of("y"))
    assert found.texts == [b"10:2", b"7:4", b"5:1:apple", b"4:3:pickle", b"1:0:fig"]


@pytest.mark.parametrize("name", [name for name, datatype in DATATYPES.items() if datatype.kind in ("int", "uint", "float")])
def test_every_type_of_number_has_an_order(name: str) -> None:
    values = np.array([1, 3, 2], ml_dtypes.bfloat16 if name == "BF16" else DATATYPES[name].numpy)
    assert [text.split(b":")[1] for text in classes(values, 3, name).texts] == [b"1", b"2", b"0"]


def test_integers_are_compared_exactly() -> None:
    assert texts([0, 2**64 - 1, 2**64 - 2], 2, "UINT64") == [f"{2**64 - 1}:1", f"{2**64 - 2}:2"]
    assert texts([-(2**63), 2**63 - 1], 2, "INT64") == [f"{2**63 - 1}:1", f"{-(2**63)}:0"]


def test_equal_values_are_ordered_by_index() -> None:
    assert [text.split(":")[1] for text in texts([1, 2, 2, 1, 2, 1], 4)] == ["1", "2", "4", "0"]


def test_nan_comes_last() -> None:
    values = [np.nan, 1, -np.inf, np.inf]
    assert texts(values, 4) == ["inf:3", "1.000000:1", "-inf:2", "nan:0"]
    assert texts([np.nan] * 2 + values * 20_000, 60_003)[-4:] == ["-inf:80000", "nan:0", "nan:1", "nan:2"]


def test_each_row_of_a_batch_has_its_own() -> None:
    assert classes([[[1], [2]], [[4], [3]]], 1, "INT8", batched=True) == Classes((2, 1), [b"2:1", b"4:0"])


@pytest.mark.parametrize(("shape", "batched", "kept"), [((0, 3), True, (0, 2)), ((2, 0), True, (2, 0)), ((0,), False, (0,))])
def test_an_empty_output_has_none(shape: tuple[int, ...], batched: bool, kept: tuple[int, ...]) -> None:
    assert classes(np.zeros(shape, np.float32), 2, batched=batched) == Classes(kept, [])


def test_more_classes_than_elements_gives_all() -> None:
    assert classes([1, 2], 10**18, "INT8") == Classes((2,), [b"2:1", b"1:0"])


def test_large_classification_agrees_with_a_sort() -> None:
    values = np.random.default_rng(7).integers(0, 5000, MAX_ELEMENTS, np.int32)
    expected = np.argsort(-values, kind="stable")[:3000].tolist()
    assert [int(text.split(b":")[1]) for text in classes(values, 3000, "INT32").texts] == expected


@pytest.mark.parametrize(
    ("shape", "count", "message"),
    [
        ((MAX_ELEMENTS + 1,), 1, f"output 'y': {MAX_ELEMENTS + 1} elements; at most {MAX_ELEMENTS} can be classified"),
        ((2, MAX_TEXTS), MAX_TEXTS, f"output 'y': 2 times {MAX_TEXTS} classes; an answer has at most {MAX_TEXTS}"),
    ],
)
def test_too_large_classification_is_refused(shape: tuple[int, ...], count: int, message: str) -> None:
    with pytest.raises(BadRequest) as refused:
        classes(np.zeros(shape, np.int8), count, "INT8", batched=len(shape) == 2)
    assert str(refused.value) == message


def test_large_classification_yields_often() -> None:
    array = np.zeros(MAX_ELEMENTS, np.float32)
    steps = classify(spec("y", "FP32"), memoryview(array), array.shape, 1, False, ())
    assert finish(steps)[0] >= MAX_ELEMENTS >> 15
    rows = np.zeros((1000, 1000), np.float32)
    assert finish(classify(spec("y", "FP32"), memoryview(rows).cast("B"), rows.shape, 5, True, ()))[0] >= 30
    many = finish(classify(spec("y", "FP32"), memoryview(array), (MAX_ELEMENTS,), MAX_TEXTS, False, ()))[0]
    assert many >= MAX_TEXTS >> 10


def answer(wanted: RequestedOutput, cache: RequestCache | None = None, max_batch: int = 0) -> InferResponse:
    """The answer of a model whose output is 1.5, 4, 3 and -1."""
    slot = roomy()
    slot.view[:16] = floats([1.5, 4, 3, -1])
    signature = Signature((), (TensorSpec("y", DATATYPES["FP32"], ("n",)),), max_batch)
    request = InferRequest(None, (), (wanted,), 0, None, wanted.classes > 0)
    extents = [Extent((2, 2) if max_batch else (4,), 0, 16)]
    _, written = finish(write_long(request, signature, slot, extents, "literal", FRUIT))
    return (cache.encode if cache else encode)("m", "1", request, signature, slot, extents, written)


def test_classes_are_answered_as_texts_in_json() -> None:
    assert json.loads(answer(RequestedOutput(0, False, 2)).body)["outputs"] == [
        {"name": "y", "datatype": "BYTES", "shape": [2], "data": ["4.000000:1:apple", "3.000000:2"]}
    ]


def test_classes_are_answered_as_texts_in_binary() -> None:
    for cache in (None, RequestCache()):
        for _ in range(2):
            response = answer(RequestedOutput(0, True, 1), cache, max_batch=4)
            packed = wire.pack([b"4.000000:1:apple", b"3.000000:0:fig"])
            assert json.loads(response.body[: response.header_length])["outputs"] == [
                {"name": "y", "datatype": "BYTES", "shape": [2, 1], "parameters": {"binary_data_size": len(packed)}}
            ]
            assert response.body[response.header_length or 0 :] == packed


def test_labels_say_of_which_outputs_they_are() -> None:
    assert (repr(FRUIT), repr(UNLABELLED), UNLABELLED.of("y")) == ("<Labels of y>", "<Labels of nothing>", ())
