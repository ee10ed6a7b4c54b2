import os
import tracemalloc

import pytest

from server.link.arena import MESSAGE, Arena, attach, attach_memory, create, create_memory, nbytes
from server.link.slots import SMALLEST
from tests.memory import arena_of, lent

SIZE = 4 * SMALLEST


@pytest.fixture
def twice() -> tuple[Arena, Arena]:
    """The same memory, mapped as by two processes."""
    descriptor, memory = create(3), create_memory(SIZE)
    here, there = (attach(descriptor, 3, attach_memory(memory, SIZE)) for _ in range(2))
    os.close(descriptor)
    os.close(memory)
    return lent(here), there


def test_both_mappings_show_the_same_slots_at_different_addresses(twice: tuple[Arena, Arena]) -> None:
    here, there = twice
    for index in range(3):
        here.slot(index).reserve(2)
        there.slot(index).use_block(here.slot(index).start, here.slot(index).capacity)
        for part in ("view", "ticket", "completion"):
            getattr(here.slot(index), part)[:2] = bytes([index, len(part)])
    here.cells(0)[2], here.cells(1)[2] = 7, 8
    for index in range(3):
        for part in ("view", "ticket", "completion"):
            assert bytes(getattr(there.slot(index), part)[:2]) == bytes([index, len(part)])
    assert (there.cells(0)[2], there.cells(1)[2]) == (7, 8)
    assert here.slot(0).address != there.slot(0).address


@pytest.mark.parametrize("count", [1, 3, 600])
def test_the_parts_of_an_arena_do_not_overlap(count: int) -> None:
    arena = arena_of(count)
    for ring in (0, 1):
        arena.cells(ring)[count - 1] = 0xFFFFFFFF
    arena.total_put[0] = 5
    for slot in [arena.slot(index) for index in {0, count // 2, count - 1}]:
        assert not any(slot.ticket[:8])
        slot.ticket[:] = b"\x01" * MESSAGE
        slot.completion[:] = b"\x02" * MESSAGE
        slot.reserve(1)
        assert not any(slot.view[:64])
    assert [arena.cells(ring)[count - 1] for ring in (0, 1)] == [0xFFFFFFFF] * 2
    assert arena.total_put[0] == 5
    assert nbytes(count) > count * 2 * MESSAGE


def test_slots_take_memory_at_first_use_only() -> None:
    """A `queue` of 10**9 took 8 GiB of each process that has its arena, and half a minute of the start."""
    count, memory = 10**7, create_memory(SIZE)
    descriptor, mapped = create(count), attach_memory(memory, SIZE)
    tracemalloc.start()
    try:
        arena = attach(descriptor, count, mapped)
        assert arena.slot(count - 1).index == count - 1
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
        os.close(descriptor)
        os.close(memory)
    for wrong in (count, -1):
        with pytest.raises(IndexError):
            arena.slot(wrong)


def test_tensor_memory_commits_only_pages_that_were_written() -> None:
    descriptor = create_memory(1 << 30)
    memory = attach_memory(descriptor, 1 << 30)
    memory.view[-1:] = b"x"
    assert os.fstat(descriptor).st_size == memory.nbytes == 1 << 30
    assert os.fstat(descriptor).st_blocks * 512 < 1 << 20
    os.close(descriptor)
