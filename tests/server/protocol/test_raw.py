import pytest

from engines import Signature, wire
from server.errors import BadRequest
from server.protocol.request import Limits, RequestedOutput

from .messages import (
    BATCHED,
    LIMITS,
    PAIR,
    floats,
    model,
    packed,
    take_bytes,
)

RAW = "Inference-Header-Content-Length: 0, a raw body,"


def raw(body: bytes, signature: Signature) -> tuple[tuple[int, ...], bytes]:
    """The only tensor of a body in the raw form."""
    (found,) = take_bytes(body, 0, signature).tensors
    return found


def raw_refusal(body: bytes, signature: Signature, limits: Limits = LIMITS) -> str:
    with pytest.raises(BadRequest) as caught:
        take_bytes(body, 0, signature, limits)
    return str(caught.value)


def test_a_raw_body_is_the_only_input_and_is_answered_in_binary() -> None:
    found = take_bytes(floats([1, 2, 3]), 0, model("FP32", "n"))
    assert found.tensors == (((3,), floats([1, 2, 3])),)
    assert found.request.outputs == (RequestedOutput(0, binary=True),)


def test_a_raw_body_is_a_batch_of_1() -> None:
    assert raw(floats([1, 2]), BATCHED) == ((1, 2), floats([1, 2]))
    assert raw(floats([1, 2, 3]), model("FP32", "batch", "n", max_batch=2)) == ((1, 3), floats([1, 2, 3]))
    assert "does not fit input 'x', FP32[-1, 2]" in raw_refusal(floats([1, 2, 3, 4]), BATCHED)


def test_a_raw_body_of_bytes_is_one_element_without_its_length() -> None:
    assert raw(b"abc", model("BYTES", 1)) == ((1,), packed("abc"))
    assert raw(b"", model("BYTES", "n")) == ((1,), packed(""))
    assert raw(b"abc", model("BYTES", "batch", 1, max_batch=2)) == ((1, 1), packed("abc"))
    assert raw(b"\xff\0", model("BYTES", 1)) == ((1,), wire.pack([b"\xff\0"]))


@pytest.mark.parametrize(
    ("body", "signature", "message"),
    [
        (b"\0" * 8, PAIR, f"{RAW} needs a model of 1 input; this one has 2"),
        (b"", Signature((), ()), f"{RAW} needs a model of 1 input; this one has 0"),
        (b"\0" * 4, model("FP32", "n", "m"), f"{RAW} cannot tell the shape of input 'x', [-1, -1]; send its shape in JSON"),
        (b"a", model("BYTES", 2), f"{RAW} cannot tell the shape of input 'x', [2]; send its shape in JSON"),
        (b"\0" * 4, model("FP32", 2), f"{RAW} of 4 bytes does not fit input 'x', FP32[2]"),
        (b"\0" * 12, model("FP32", 2, "n"), f"{RAW} of 12 bytes does not fit input 'x', FP32[2, -1]"),
        (b"\0" * 5, model("FP32", "n"), f"{RAW} of 5 bytes does not fit input 'x', FP32[-1]"),
        (b"\0", model("FP32", 0, "n"), f"{RAW} of 1 byte does not fit input 'x', FP32[0, -1]"),
        (b"\x02", model("BOOL", "n"), "raw body ('x'), BOOL [1]: bytes other than 0 and 1"),
    ],
)
def test_a_raw_body_that_does_not_fit_is_refused(body: bytes, signature: Signature, message: str) -> None:
    assert raw_refusal(body, signature).startswith(message)


def test_a_raw_body_has_no_more_elements_than_any_other() -> None:
    message = raw_refusal(b"\0" * 12, model("INT8", "n"), Limits(json=1, elements=11))
    assert message == "shape of the raw body: [12] is more than the 11 elements that a body could carry"
