import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.model_files.frame import Frame, FrameError

FRAME = Frame(b"\x89TESTED\n", 3)
FIELDS = st.lists(st.binary(max_size=20), max_size=5)


@given(FIELDS)
def test_unpacking_reverses_packing(fields: list[bytes]) -> None:
    assert FRAME.unpack(FRAME.pack(fields), len(fields)) == fields


@given(FIELDS, st.data())
def test_a_file_cut_anywhere_is_refused_and_still_owned(fields: list[bytes], data: st.DataObject) -> None:
    whole = FRAME.pack(fields)
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    assert FRAME.owns(part)
    with pytest.raises(FrameError, match="truncated"):
        FRAME.unpack(part)


@given(FIELDS, st.data())
def test_a_changed_byte_anywhere_is_refused(fields: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(FRAME.pack(fields))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        FRAME.unpack(bytes(whole))


def test_another_version_is_named_beside_the_one_expected_even_in_a_short_file() -> None:
    whole = Frame(FRAME.magic, 4).pack([b"later"])
    with pytest.raises(FrameError, match="version 4; this reads version 3"):
        FRAME.unpack(whole[:-1])


def test_a_wrong_length_is_named_beside_the_one_found() -> None:
    whole = FRAME.pack([b"x"])
    with pytest.raises(FrameError, match=f"too long: {len(whole) + 1} bytes, but it says {len(whole)}"):
        FRAME.unpack(whole + b"!")


def test_a_wrong_number_of_fields_is_named_beside_the_one_expected() -> None:
    with pytest.raises(FrameError, match="it has 2 fields; expected 3"):
        FRAME.unpack(FRAME.pack([b"", b""]), 3)


def test_another_magic_is_named_and_not_owned() -> None:
    other = Frame(b"\x89OTHERS\n", 3).pack([])
    assert not FRAME.owns(other)
    with pytest.raises(FrameError, match=r"OTHERS.*expected.*TESTED"):
        FRAME.unpack(other)


def lying(*fields: bytes) -> bytes:
    """A file whose checksum is right and whose fields are as given, lengths included."""
    body = struct.pack("<8sIIQ", FRAME.magic, FRAME.version, len(fields), 24 + sum(map(len, fields)) + 32) + b"".join(fields)
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    ("field", "why"),
    [
        (b"\xff\0\0\0\0\0\0\0short", "field 0 of 1 ends at byte"),
        (b"\1", "field 0 of 1 ends at byte"),
        (b"\0\0\0\0\0\0\0\0rest", "4 bytes left after 1 fields"),
    ],
)
def test_fields_that_do_not_add_up_are_refused_though_the_checksum_is_right(field: bytes, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        FRAME.unpack(lying(field))
