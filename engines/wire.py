"""BYTES tensors in wire form: each element is a little-endian uint32 length and then that many bytes.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

import struct
from collections.abc import Iterable, Iterator, Sequence

_LENGTH = struct.Struct("<I")


def pack(elements: Iterable[bytes]) -> bytes:
    """Join elements into wire form."""
    return b"".join([part for element in elements for part in (_LENGTH.pack(len(element)), element)])


def unpack(data: "bytes | memoryview", count: int) -> list[bytes]:
    """Split `data` into exactly `count` elements. Raises ValueError that says what is wrong."""
    elements, end = split(data, count)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes left after {count} elements")
    return elements


def split(data: "bytes | memoryview", count: int) -> tuple[list[bytes], int]:
    """Split `count` elements off the front of `data`; return them and the offset of the rest. Raises ValueError."""
    elements: list[bytes] = []
    at, size = 0, len(data)
    while len(elements) < count:
        if at + 4 > size or at + 4 + (length := _LENGTH.unpack_from(data, at)[0]) > size:
            raise _missing(data, at, len(elements), count)
        elements.append(bytes(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return elements, at


def starts(data: "bytes | memoryview", count: int) -> Iterator[int]:
    """The offset of each of exactly `count` elements, one after another. Raises ValueError as `unpack` does, when it gets
    there.
    """
    at, size, unpack = 0, len(data), _LENGTH.unpack_from
    for index in range(count):
        if at + 4 > size or at + 4 + (length := unpack(data, at)[0]) > size:
            raise _missing(data, at, index, count)
        yield at
        at += 4 + length
    if at != size:
        raise ValueError(f"{size - at} bytes left after {count} elements")


def _missing(data: "bytes | memoryview", at: int, index: int, count: int) -> ValueError:
    """The error for an element at this offset that is incomplete."""
    left = len(data) - at - 4
    if left < 0:
        return ValueError(f"element {index} of {count} has no length: the data ends at byte {len(data)}")
    return ValueError(f"element {index} claims {_LENGTH.unpack_from(data, at)[0]} bytes, but {left} are left")


def texts(elements: Sequence[bytes]) -> list[str]:
    """Decode every element as UTF-8, as JSON requires. Raises ValueError naming the first that is not."""
    decoded = []
    for index, element in enumerate(elements):
        try:
            decoded.append(element.decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"element {index} is not UTF-8 ({error.reason} at byte {error.start})") from error
    return decoded
