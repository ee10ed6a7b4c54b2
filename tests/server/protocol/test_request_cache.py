import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import DATATYPES, Signature, TensorMismatch, TensorSpec
from engines.memory import view
from engines.signature import Default, Form
from server.errors import BadRequest, Failed, RequestError, TooLarge
from server.link.messages import Extent
from server.link.slots import SMALLEST, Slot
from server.protocol.request import InferRequest, Limits, RequestedOutput, decode
from server.protocol.request_cache import RequestCache
from server.protocol.response import encode
from tests.memory import slot_of

from .messages import BATCHED, LIMITS, binary, body_of, floats, model, request, spec, tensor

TWO = Signature((spec("data", "FP32", "n"), spec("x", "INT16", 2)), (spec("y", "FP32", "n"),))
HALVES = bytes(range(4))
ESCAPED = body_of(request(tensor([1.0, 2.0], name="a"), binary(4, "INT16"))).replace(b'"data":', b'"d\\u0061ta":')
"""The key "data", escaped so that a search in the bytes does not find it."""


def content(taken: InferRequest, slot: Slot, signature: Signature) -> list[bytes]:
    tensors, _ = slot.inputs(signature, taken.shapes, slot.capacity)
    return [bytes(view(tensor.address, tensor.nbytes)) for tensor in tensors]


def outcome(decoder: Any, body: bytes, header_length: int | None, signature: Signature) -> Any:
    """The decoded request and its tensors, or the refusal."""
    slot = slot_of()
    try:
        taken = decoder(body, header_length, signature, slot, LIMITS)
    except (RequestError, TensorMismatch) as error:
        return type(error), str(error)
    return taken, content(taken, slot, signature)


def check(cache: RequestCache, document: Any, tensors: bytes, signature: Signature, past: int = 0) -> None:
    """A request must decode the same with the cache as without."""
    head = body_of(document)
    length = len(head) + past
    assert outcome(cache.decode, head + tensors, length, signature) == outcome(decode, head + tensors, length, signature)


def test_same_json_with_other_tensors_is_cached_once() -> None:
    cache = RequestCache()
    document = request(binary(8, shape=[1, 2]), parameters={"priority": 2, "binary_data_output": True})
    for values in ([1, 2], [3, 4], [5, 6]):
        check(cache, document, floats(values), BATCHED)
    assert repr(cache) == "<RequestCache 1>"


def test_cached_tensors_are_placed_in_the_models_order() -> None:
    cache = RequestCache()
    document = request(binary(4, "INT16", name="x"), binary(8, name="data"))
    for values in ([1, 2], [3, 4]):
        check(cache, document, HALVES + floats(values), TWO)
    assert repr(cache) == "<RequestCache 1>"


def test_reshaped_tensors_are_cached_with_the_models_shapes() -> None:
    form = Form((-1, 2, 1), (-1, 2))
    x, y = (TensorSpec(name, DATATYPES["FP32"], ("batch", 2), form=form) for name in "xy")
    signature, cache = Signature((x,), (y,), 4), RequestCache()
    document = request(binary(16, shape=[2, 2, 1]), parameters={"binary_data_output": True})
    for values in ([1, 2, 3, 4], [3, 4, 5, 6]):
        check(cache, document, floats(values), signature)
    assert repr(cache) == "<RequestCache 1>"
    head = body_of(document)
    slot = slot_of()
    taken = cache.decode(head + floats([1, 2, 3, 4]), len(head), signature, slot, LIMITS)
    assert taken.shapes == ((2, 2),)
    for _ in range(2):
        answer = cache.encode("m", "1", taken, signature, slot, [Extent((2, 2), 0, 16)])
        body, length = answer.body, answer.header_length
        assert json.loads(body[:length])["outputs"][0]["shape"] == [2, 2, 1]
    wrong = request(binary(16, shape=[2, 2]))
    assert outcome(cache.decode, body_of(wrong) + floats([1, 2, 3, 4]), len(body_of(wrong)), signature) == (
        TensorMismatch,
        "input 'x': shape [2, 2]; expected one as in [-1, 2, 1]",
    )


def test_defaults_of_missing_inputs_do_not_come_from_another_request() -> None:
    inputs = (spec("x", "FP32", "n"), TensorSpec("k", DATATYPES["INT16"], ("m",), default=Default((2,), HALVES)))
    signature, cache = Signature(inputs, ()), RequestCache()
    without, whole = request(binary(4)), request(binary(4), binary(2, "INT16", name="k"))
    for _ in range(3):
        check(cache, without, floats([1]), signature)
        check(cache, whole, floats([2]) + b"ab", signature)
    slot = slot_of()
    taken = cache.decode(body_of(without) + floats([3]), len(body_of(without)), signature, slot, LIMITS)
    assert (taken.shapes, content(taken, slot, signature)) == (((1,), (2,)), [floats([3]), HALVES])
    assert repr(cache) == "<RequestCache 1>"
    refused = outcome(cache.decode, body_of(request()), None, signature)
    assert refused == (BadRequest, "inputs: 'x' missing; the model takes 'x', 'k'")


def test_output_without_a_reshape_for_its_shape_fails() -> None:
    signature = Signature((), (TensorSpec("y", DATATYPES["FP32"], ("", ""), form=Form((4, -1), (2, 2, -1))),))
    asked = InferRequest(None, (), (RequestedOutput(0, binary=True),), 0, None)
    with pytest.raises(
        Failed, match=r"^output 'y': the model gave shape \[3, 2\]; its configuration has \[2, 2, -1\] reshaped$"
    ):
        encode("m", "1", asked, signature, slot_of(), [Extent((3, 2), 0, 0)])


def test_cached_request_reserves_memory_for_its_outputs() -> None:
    signature = Signature((spec("x", "FP32", "n"),), (spec("y", "FP32", "n", SMALLEST),))
    document, cache = body_of(request(binary(4))), RequestCache()
    for _ in range(2):
        slot = slot_of()
        cache.decode(document + b"\0" * 4, len(document), signature, slot, LIMITS)
        assert slot.inputs(signature, [(1,)], slot.capacity)[1].nbytes >= 4 * SMALLEST


@pytest.mark.parametrize("tensors", [b"", b"\0" * 7, b"\0" * 9, b"\0" * 16])
def test_cached_request_with_another_body_length_is_refused(tensors: bytes) -> None:
    cache = RequestCache()
    document = request(binary(8, shape=[1, 2]))
    check(cache, document, b"\0" * 8, BATCHED)
    check(cache, document, tensors, BATCHED)
    check(cache, document, b"\0" * 8, BATCHED)
    assert repr(cache) == "<RequestCache 1>"


@pytest.mark.parametrize("past", [1, 1000])
def test_cached_request_with_header_length_past_the_body_is_refused(past: int) -> None:
    cache = RequestCache()
    document = request(binary(0))
    check(cache, document, b"", model())
    assert repr(cache) == "<RequestCache 1>"
    check(cache, document, b"", model(), past)


@pytest.mark.parametrize(
    ("head", "tensors", "signature"),
    [
        (request(binary(5, "BYTES", [1])), b"\x01\0\0\0a", model("BYTES")),
        (request(binary(1, "BOOL")), b"\x01", model("BOOL")),
        (request(binary(4), id="7"), b"\0" * 4, model()),
        (request(tensor([1.0])), b"", model()),
        (request(tensor([1.0, 2.0], name="data"), binary(4, "INT16")), HALVES, TWO),
        (ESCAPED, HALVES, Signature((spec("a", "FP32", "n"), *TWO.inputs[1:]), ())),
        (request(binary(4), parameters={"note": "x" * 5000}), b"\0" * 4, model()),
    ],
)
def test_requests_that_need_checking_each_time_are_not_cached(head: Any, tensors: bytes, signature: Signature) -> None:
    cache = RequestCache()
    for _ in range(2):
        check(cache, head, tensors, signature)
    assert repr(cache) == "<RequestCache 0>"


def test_cache_keeps_the_latest_64_requests() -> None:
    cache = RequestCache()
    for number in range(100):
        check(cache, request(binary(4), parameters={"n": number}), b"\0" * 4, model())
    assert repr(cache) == "<RequestCache 64>"
    check(cache, request(binary(4), parameters={"n": 0}), b"\0" * 4, model())


def test_a_request_over_the_limit_of_json_is_refused_each_time() -> None:
    cache, document = RequestCache(), body_of(request(binary(4)))
    for _ in range(2):
        with pytest.raises(TooLarge):
            cache.decode(document + b"\0" * 4, len(document), model(), slot_of(), Limits(len(document) - 1, 9))


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=13), st.integers(-1, 1)), max_size=8))
def test_any_sequence_of_requests_decodes_as_without_a_cache(steps: list[tuple[int, bytes, int]]) -> None:
    cache = RequestCache()
    documents = [
        request(binary(8, name="data"), binary(4, "INT16")),
        request(binary(4, "INT16"), binary(8, name="data")),
        request(tensor([1.0], name="data"), binary(4, "INT16")),
        request(binary(0, name="data"), binary(4, "INT16")),
    ]
    for which, tensors, past in steps:
        check(cache, documents[which], tensors, TWO, past)


def test_cache_key_is_the_exact_json() -> None:
    cache, document = RequestCache(), request(binary(4))
    check(cache, document, b"\0" * 4, model())
    check(cache, json.dumps(document, indent=1).encode(), b"\0" * 4, model())
    assert repr(cache) == "<RequestCache 2>"
    with pytest.raises(BadRequest):
        cache.decode(b"", 1, model(), slot_of(), LIMITS)


def written(slot: Slot, at: int, *values: float, rows: int = 1) -> list[Extent]:
    """An output at any offset in the slot, as in a batch."""
    data = floats(list(values))
    slot.view[at : at + len(data)] = data
    return [Extent((rows, len(values) // rows), at, len(data))]


def answers(cache: RequestCache, taken: InferRequest, slot: Slot, extents: list[Extent]) -> bool:
    """The answer must be the same with the cache as without."""
    parts = ("m", "1", taken, BATCHED, slot, extents)
    return cache.encode(*parts) == encode(*parts)


@pytest.mark.parametrize("binary_data", [True, False])
def test_encoded_answers_are_the_same_as_without_a_cache(binary_data: bool) -> None:
    cache, slot = RequestCache(), slot_of()
    body = body_of(request(binary(8, shape=[1, 2]), parameters={"binary_data_output": binary_data}))
    taken, other = (cache.decode(body + floats([1, 2]), len(body), BATCHED, slot, limits) for limits in (LIMITS, LIMITS))
    assert taken is other or not binary_data
    for at, *values in ((0, 1, 2), (0, 3, 4), (64, 5, 6), (128, 7, 8), (64, 1, 2, 3, 4), (0, 1, 2)):
        assert answers(cache, taken, slot, written(slot, at, *values))
    assert answers(cache, taken, slot, written(slot, 0, 1, 2, 3, 4, rows=2))
