"""Files of length-prefixed fields, which are refused unless they are complete.

    magic      8 bytes
    version    u32     of the layout of the fields
    count      u32     of fields
    length     u64     of the whole file in bytes
    fields             each a u64 length and that many bytes
    checksum   32      SHA-256 of everything before it

Numbers are little-endian. `Frame.unpack` checks the parts in this order. The checksum comes last, so that a file of another
version and a truncated file are refused as such, not as damaged.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

_HEAD = struct.Struct("<8sIIQ")
_LENGTH = struct.Struct("<Q")
_CHECKSUM = 32
_LONGEST = 1 << 26
"""Of a field that is read by itself: what a damaged length says is not taken of memory."""


class FrameError(ValueError):
    """Not a complete file of this kind; the text says what came and what was expected."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One kind of file. `magic` is 8 bytes."""

    magic: bytes
    version: int

    def owns(self, data: bytes | memoryview) -> bool:
        """Whether this is such a file, or the beginning of one: it starts with the magic, or ends within it."""
        return self.magic[: len(data)] == bytes(data[: len(self.magic)])

    def pack(self, fields: Sequence[bytes | memoryview]) -> bytes:
        """The file with these fields."""
        length = _HEAD.size + sum(_LENGTH.size + len(field) for field in fields) + _CHECKSUM
        parts: list[bytes | memoryview] = [_HEAD.pack(self.magic, self.version, len(fields), length)]
        for field in fields:
            parts += [_LENGTH.pack(len(field)), field]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return b"".join([*parts, digest.digest()])

    def unpack(self, data: bytes | memoryview, count: int | None = None) -> list[memoryview]:
        """The fields, as views of `data`; with `count`, exactly so many. Raises FrameError."""
        view = memoryview(data)
        self._check_head(view, count)
        body, checksum = view[:-_CHECKSUM], view[-_CHECKSUM:]
        if (found := hashlib.sha256(body).digest()) != checksum:
            raise FrameError(f"damaged: its checksum is {found.hex()[:12]}, but it says {bytes(checksum).hex()[:12]}")
        return list(_fields(body))

    def first(self, file: BinaryIO, count: int) -> list[bytes]:
        """The first fields of a file, without reading or checking the rest. Raises FrameError where there are none such."""
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or _HEAD.unpack(head)[:2] != (self.magic, self.version):
            raise FrameError("not such a file")
        found = []
        for _ in range(count):
            length = file.read(_LENGTH.size)
            found.append(file.read(min(int.from_bytes(length, "little"), _LONGEST)))
            if len(length) < _LENGTH.size or len(found[-1]) < int.from_bytes(length, "little"):
                raise FrameError("truncated")
        return found

    def _check_head(self, view: memoryview, count: int | None) -> None:
        if len(view) < _HEAD.size:
            raise FrameError(f"truncated: {len(view)} bytes, but its head alone has {_HEAD.size}")
        magic, version, fields, length = _HEAD.unpack_from(view)
        if magic != self.magic:
            raise FrameError(f"begins with {magic!r}; expected {self.magic!r}")
        if version != self.version:
            raise FrameError(f"its format is version {version}; this reads version {self.version}")
        if length != len(view):
            raise FrameError(f"{'truncated' if len(view) < length else 'too long'}: {len(view)} bytes, but it says {length}")
        if count not in (None, fields):
            raise FrameError(f"it has {fields} fields; expected {count}")


def _fields(body: memoryview) -> Iterator[memoryview]:
    """The fields between head and checksum. Raises FrameError if their lengths do not add up: a right checksum only shows that
    the file is as it was written, not that it was written correctly.
    """
    count, at = _HEAD.unpack_from(body)[2], _HEAD.size
    for index in range(count):
        length = _LENGTH.unpack_from(body, at)[0] if at + _LENGTH.size <= len(body) else len(body)
        at += _LENGTH.size + length
        if at > len(body):
            raise FrameError(f"field {index} of {count} ends at byte {at}, but the fields end at byte {len(body)}")
        yield body[at - length : at]
    if at != len(body):
        raise FrameError(f"{len(body) - at} bytes left after {count} fields")
