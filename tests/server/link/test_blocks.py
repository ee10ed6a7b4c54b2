import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import MemoryFull
from server.link.blocks import LARGE, UNIT, BlockAllocator, block_size, largest_block

MIB = 1 << 20


def test_small_blocks_come_from_the_beginning_and_large_ones_from_the_end() -> None:
    blocks = BlockAllocator(64 * MIB)
    assert [blocks.allocate(1), blocks.allocate(LARGE), blocks.allocate(16 * MIB)] == [
        (0, UNIT),
        (UNIT, LARGE),
        (48 * MIB, 16 * MIB),
    ]
    assert repr(blocks) == f"<BlockAllocator, {UNIT + LARGE + 16 * MIB} of {64 * MIB} bytes in use>"


def test_the_block_freed_last_is_allocated_first() -> None:
    blocks = BlockAllocator(64 * MIB)
    first, second, large = blocks.allocate(10), blocks.allocate(20), blocks.allocate(30 * MIB)
    for each in (first, large, second):
        blocks.free(*each)
    assert [blocks.allocate(30), blocks.allocate(29 * MIB), blocks.allocate(40)] == [second, large, first]


def test_large_requests_leave_an_eighth_for_small_ones() -> None:
    blocks = BlockAllocator(64 * MIB)
    while True:
        try:
            blocks.allocate(2 * MIB)
        except MemoryFull:
            break
    assert blocks.used == 56 * MIB
    for _ in range(8):
        blocks.allocate(LARGE)
    with pytest.raises(MemoryFull, match="the largest piece left for one is 0 "):
        blocks.allocate(1)


def test_freed_small_blocks_merge_for_a_large_request() -> None:
    blocks = BlockAllocator(64 * MIB)
    small = [blocks.allocate(10) for _ in range(64 * MIB // UNIT)]
    for each in small:
        blocks.free(*each)
    assert blocks.allocate(56 * MIB) == (8 * MIB, 56 * MIB)


def test_spare_memory_is_added_if_it_is_free() -> None:
    blocks = BlockAllocator(64 * MIB)
    assert blocks.allocate(MIB, 4 * MIB)[1] == 5 * MIB
    assert blocks.allocate(MIB, 64 * MIB)[1] == MIB, "but not at the price of being refused"


@given(st.integers(0, 1 << 40))
def test_block_size_is_at_most_an_eighth_or_a_unit_more_than_asked_for(nbytes: int) -> None:
    size = block_size(nbytes)
    assert size % UNIT == 0
    assert nbytes <= size <= nbytes + max(UNIT, nbytes // 8 + 1)
    assert block_size(size) == size


@given(st.integers(MIB, 1 << 40))
def test_largest_block_can_be_allocated_of_fresh_memory(nbytes: int) -> None:
    most = largest_block(nbytes)
    start, size = BlockAllocator(nbytes).allocate(most)
    assert size == most
    assert start % UNIT == 0
    assert 0 <= start <= start + size <= nbytes
