import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import wire

ELEMENTS = st.lists(st.binary(max_size=40), max_size=20)


def _length(count: int) -> bytes:
    return struct.pack("<I", count)


@given(ELEMENTS)
def test_unpacking_reverses_packing(elements: list[bytes]) -> None:
    packed = wire.pack(elements)
    assert wire.unpack(packed, len(elements)) == elements
    assert wire.unpack(memoryview(packed), len(elements)) == elements


def test_the_wire_form_is_a_little_endian_length_and_then_the_bytes() -> None:
    assert wire.pack([b"ab", b"", b"c"]) == b"\x02\0\0\0ab\0\0\0\0\x01\0\0\0c"


@given(ELEMENTS, st.binary(min_size=1, max_size=20))
def test_bytes_that_are_left_over_are_counted(elements: list[bytes], rest: bytes) -> None:
    with pytest.raises(ValueError, match=f"{len(rest)} bytes left after {len(elements)} elements"):
        wire.unpack(wire.pack(elements) + rest, len(elements))


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=20), st.data())
def test_data_that_is_cut_short_anywhere_is_refused(elements: list[bytes], data: st.DataObject) -> None:
    packed = wire.pack(elements)
    end = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ValueError, match=r"has no length: the data ends at|claims \d+ bytes, but \d+ are left"):
        wire.unpack(packed[:end], len(elements))


@given(st.binary(max_size=64), st.integers(0, 8))
def test_any_bytes_are_unpacked_or_refused_and_nothing_else(data: bytes, count: int) -> None:
    try:
        elements = wire.unpack(data, count)
    except ValueError:
        return
    assert wire.pack(elements) == data


@pytest.mark.parametrize("claimed", [3, 2**31, 2**32 - 1])
def test_an_element_that_claims_more_than_there_is_is_named(claimed: int) -> None:
    with pytest.raises(ValueError, match=f"element 1 claims {claimed} bytes, but 2 are left"):
        wire.unpack(wire.pack([b"x"]) + _length(claimed) + b"ab", 2)


@pytest.mark.parametrize("rest", [b"", b"\0", b"\0\0\0"])
def test_an_element_without_a_length_is_named(rest: bytes) -> None:
    with pytest.raises(ValueError, match=f"element 1 of 2 has no length: the data ends at byte {5 + len(rest)}"):
        wire.unpack(wire.pack([b"x"]) + rest, 2)


def test_a_count_that_the_data_cannot_hold_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=f"element 1 of {10**15} has no length"):
        wire.unpack(wire.pack([b"x"]), 10**15)


def test_the_first_element_that_is_not_utf_8_is_named() -> None:
    with pytest.raises(ValueError, match=r"element 1 is not UTF-8 \(invalid start byte at byte 2\)"):
        wire.texts([b"fine", b"ab\xff", b"\xff"])
