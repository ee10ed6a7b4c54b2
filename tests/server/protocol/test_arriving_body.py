"""Bodies that are received straight into a slot must be decoded as those that came whole."""

from typing import Any

import pytest

from engines import DATATYPES, Signature, wire
from engines.memory import view
from engines.signature import Default, TensorSpec
from server.errors import BadRequest, MemoryFull, RequestError
from server.link.slots import Slot
from server.protocol.arriving_body import ArrivingBody
from server.protocol.request import InferRequest, decode, place
from server.protocol.request_cache import MAX_JSON_BYTES, RequestCache
from tests.memory import slot_of

from .messages import BATCHED, LIMITS, PAIR, binary, body_of, floats, model, request, spec, tensor

TWO = Signature((spec("data", "FP32", "n"), spec("x", "INT16", 2)), (spec("y", "FP32", "n"),))
THREE = Signature((spec("a", "FP32", "i"), spec("b", "FP32", "j"), spec("c", "FP32", "k")), (spec("y", "FP32", "n"),))
DEFAULT = Signature((spec("x", "FP32", "n"), TensorSpec("k", DATATYPES["INT16"], (2,), default=Default((2,), b"abcd"))), ())
TEXTS = wire.pack([b"some", b"", b"texts"])

REQUESTS: dict[str, tuple[Any, bytes, Signature]] = {
    "one tensor": (request(binary(16)), floats([1, 2, 3, 4]), model()),
    "a batch": (request(binary(16, shape=[2, 2])), floats([1, 2, 3, 4]), BATCHED),
    "in another order than the model's": (
        request(binary(4, "INT16", name="x"), binary(8, name="data")),
        b"ab\0\0" + floats([1, 2]),
        TWO,
    ),
    "one as JSON": (request(tensor([1.5, 2.5], name="data"), binary(4, "INT16", name="x")), b"abcd", TWO),
    "an empty one between others": (
        request(binary(4, name="a"), binary(0, name="b"), binary(8, name="c")),
        floats([1, 2, 3]),
        THREE,
    ),
    "a default": (request(binary(8)), floats([1, 2]), DEFAULT),
    "with an id": (request(binary(8), id="7"), floats([1, 2]), model()),
    "booleans": (request(binary(3, "BOOL", shape=[3])), b"\0\1\1", model("BOOL")),
    "texts": (
        request(binary(4 * 2, "INT32", name="a"), binary(len(TEXTS), "BYTES", shape=[3], name="b"), outputs=[{"name": "c"}]),
        bytes(8) + TEXTS,
        PAIR,
    ),
    "raw": (b"", floats([1, 2, 3]), model()),
}


def content(taken: InferRequest, slot: Slot, signature: Signature) -> tuple[InferRequest, list[bytes]]:
    tensors, _ = slot.inputs(signature, taken.shapes, slot.capacity)
    return taken, [bytes(view(tensor.address, tensor.nbytes)) for tensor in tensors]


def whole(head: bytes, tensors: bytes, signature: Signature) -> tuple[InferRequest, list[bytes]]:
    slot = slot_of()
    return content(decode(head + tensors, len(head), signature, slot, LIMITS), slot, signature)


def arriving(head: bytes, tensors: bytes, signature: Signature, cache: RequestCache | None = None) -> tuple[ArrivingBody, Slot]:
    slot, length = slot_of(), len(head) + len(tensors)
    found = cache.place(head, length, signature, slot, LIMITS) if cache else place(head, length, signature, slot, LIMITS)
    assert found
    return ArrivingBody(head, length, found, slot), slot


@pytest.mark.parametrize(("document", "tensors", "signature"), REQUESTS.values(), ids=REQUESTS.keys())
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_received_tensors_are_where_decode_writes_them(document: Any, tensors: bytes, signature: Signature, piece: int) -> None:
    head, cache = body_of(document), RequestCache()
    for made in (None, cache, cache):
        body, slot = arriving(head, tensors, signature, made)
        left = memoryview(tensors)
        while not body.complete:
            room = body.buffer()[:piece]
            room[:], left = left[: len(room)], left[len(room) :]
            body.advance(len(room))
            assert bytes(body.copy()) == head + tensors[: len(tensors) - len(left)]
        body.check()
        assert not left
        assert content(body.request, slot, signature) == whole(head, tensors, signature)


@pytest.mark.parametrize(("document", "tensors", "signature"), REQUESTS.values(), ids=REQUESTS.keys())
def test_bytes_received_elsewhere_are_copied_up_to_the_end_of_the_body(
    document: Any, tensors: bytes, signature: Signature
) -> None:
    body, slot = arriving(body_of(document), tensors, signature)
    assert body.write(tensors[:5]) == len(tensors[:5])
    assert body.write(tensors[5:] + b"GET / HTTP/1.1") == len(tensors[5:])
    assert body.complete
    assert content(body.request, slot, signature) == whole(body_of(document), tensors, signature)


@pytest.mark.parametrize(
    ("document", "tensors", "signature"),
    [
        (request(binary(3, "BOOL", shape=[3])), b"\0\1\2", model("BOOL")),
        (request(binary(8, "BYTES", shape=[2])), b"\0\0\0\0\1\0\0\0", model("BYTES")),
    ],
)
def test_invalid_contents_are_refused_with_the_words_of_decode(document: Any, tensors: bytes, signature: Signature) -> None:
    body, _ = arriving(body_of(document), tensors, signature)
    body.write(tensors)
    with pytest.raises(BadRequest) as refused:
        body.check()
    with pytest.raises(BadRequest) as expected:
        whole(body_of(document), tensors, signature)
    assert str(refused.value) == str(expected.value)


@pytest.mark.parametrize(
    "document", [b"{", request(), request(binary(8)), request(binary(4), binary(4)), request(binary(4, "INT8"))]
)
def test_invalid_json_is_refused_before_the_tensors(document: Any) -> None:
    head = body_of(document)
    with pytest.raises(RequestError) as refused:
        place(head, len(head) + 4, model(), slot_of(), LIMITS)
    with pytest.raises(RequestError) as expected:
        decode(head + bytes(4), len(head), model(), slot_of(), LIMITS)
    assert str(refused.value) == str(expected.value)


def test_raw_texts_and_long_json_are_not_placed() -> None:
    assert place(b"", 10, model("BYTES", 1), slot_of(), LIMITS) is None
    long = body_of(request(binary(4), id="7" * MAX_JSON_BYTES))
    assert RequestCache().place(long, len(long) + 4, model(), slot_of(), LIMITS) is None


@pytest.mark.parametrize("cached", [False, True])
def test_arriving_body_evicts_no_other(cached: bool) -> None:
    cache, head, slot = RequestCache(), body_of(request(binary(4))), slot_of()
    if cached:
        assert cache.place(head, len(head) + 4, model(), slot_of(), LIMITS)
    blocks = slot.blocks
    assert blocks
    while True:
        try:
            blocks.allocate(1)
        except MemoryFull:
            break

    def evict() -> bool:
        raise AssertionError("it must not take the place of others")

    blocks.evict = evict
    with pytest.raises(MemoryFull):
        cache.place(head, len(head) + 4, model(), slot, LIMITS)
