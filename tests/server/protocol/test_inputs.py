import pytest

from engines import Signature, TensorMismatch, wire
from server.errors import TooLarge

from .messages import (
    binary,
    model,
    refusal,
    request,
    spec,
    take,
    tensor,
)


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


def test_elements_may_be_any_bytes() -> None:
    data = wire.pack([b"\xff", b"", b"\0", "é".encode(), b"\xc3"])
    assert take(request(binary(len(data), "BYTES", [5])), model("BYTES"), data).tensors == (((5,), data),)


@pytest.mark.parametrize("data", [b"\x02", b"\0\xff", b"\x01\x01\x80"])
def test_a_byte_other_than_0_and_1_is_no_bool(data: bytes) -> None:
    message = refusal(request(binary(len(data), "BOOL")), model("BOOL"), data)
    shape = f"inputs[0] ('x'), BOOL [{len(data)}]"
    assert message == f"{shape}: bytes other than 0 and 1 in its binary data; expected one of them for each element"
