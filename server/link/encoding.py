"""What tickets and completions say of models, shapes and outputs, as bytes (msgpack) and back. Equal messages are equal bytes.

The other end of a link may have written anything. So bytes are decoded into the types named here and nothing else, and their
number bounds the memory that this takes; what does not decode is `Malformed`.
"""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from engines import Memo

from .messages import Extent, Failure, FailureKind, Malformed, ModelKey, Shape

_CACHE_SIZE = 256
_Size = Annotated[int, msgspec.Meta(ge=0)]
_requests: Any = msgspec.msgpack.Decoder(tuple[str, tuple[tuple[_Size, ...], ...], int, _Size, bool])
_outcomes: Any = msgspec.msgpack.Decoder(
    tuple[tuple[tuple[tuple[_Size, ...], _Size, _Size], ...], tuple[FailureKind, str] | None, _Size]
)
_encoder = msgspec.msgpack.Encoder()

Request = tuple[ModelKey, tuple[Shape, ...], int, int, bool]
"""What a ticket says besides its numbers: model, shapes, priority, which outputs are not asked for, whether it has begun."""
Outcome = tuple[tuple[Extent, ...], Failure | None, int]
"""What a completion says besides its times: outputs, failure, rows."""


class Serializer:
    """Messages as bytes and back, both cached, since nearly all of them repeat. For one thread.

    `decode` raises Malformed. `encode` raises OverflowError for numbers of more than 64 bits.
    """

    def __init__(self, decode: Callable[[bytes], Any]) -> None:
        self._decode = decode
        self._encoded: Memo[object, bytes] = Memo(_CACHE_SIZE)
        self._decoded: Memo[bytes, Any] = Memo(_CACHE_SIZE)

    def encode(self, said: object) -> bytes:
        try:
            return self._encoded[said]
        except KeyError:
            data = _encoder.encode(said)
            self._encoded.remember(said, data)
            return data

    def decode(self, data: bytes) -> Any:
        try:
            return self._decoded[data]
        except KeyError:
            said = self._decode(data)
            self._decoded.remember(data, said)
            return said


def encode_outcome(outputs: tuple[Any, ...], failure: Failure | None) -> bytes:
    """What a completion's page says behind its times."""
    return _encoder.encode((outputs, failure, 0))


def decode_request(data: bytes) -> Request:
    """Raises Malformed."""
    try:
        found: Request = _requests.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(f"a ticket that does not decode: {error}") from error
    return found


def decode_outcome(data: bytes) -> Outcome:
    """Raises Malformed."""
    try:
        outputs, failure, rows = _outcomes.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(f"a completion that does not decode: {error}") from error
    return tuple([Extent._make(extent) for extent in outputs]), failure and Failure._make(failure), rows
