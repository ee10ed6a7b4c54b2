import os
from itertools import pairwise

import pytest

from server.arena import MESSAGE, Arena, attach, create, nbytes
from server.slots import LARGEST, SMALLEST
from tests.memory import arena_of


@pytest.fixture
def twice() -> tuple[Arena, Arena]:
    """The same memory, mapped as by two processes."""
    descriptor = create(3)
    both = attach(descriptor, 3), attach(descriptor, 3)
    os.close(descriptor)
    return both


def test_what_one_side_writes_the_other_reads_at_an_address_of_its_own(twice: tuple[Arena, Arena]) -> None:
    here, there = twice
    for index in range(3):
        for part in ("view", "ticket", "completion"):
            getattr(here.slot(index), part)[:2] = bytes([index, len(part)])
    here.cells(0)[2], here.cells(1)[2] = 7, 8
    for index in range(3):
        for part in ("view", "ticket", "completion"):
            assert bytes(getattr(there.slot(index), part)[:2]) == bytes([index, len(part)])
    assert (there.cells(0)[2], there.cells(1)[2]) == (7, 8)
    assert here.slot(0).address != there.slot(0).address


@pytest.mark.parametrize("count", [1, 3, 600])
def test_no_part_reaches_into_another(count: int) -> None:
    arena = arena_of(count)
    for ring in (0, 1):
        arena.cells(ring)[count - 1] = 0xFFFFFFFF
    slots = [arena.slot(index) for index in {0, count // 2, count - 1}]
    for slot in slots:
        assert not any(slot.ticket[:8])
        slot.ticket[:] = b"\x01" * MESSAGE
        slot.completion[:] = b"\x02" * MESSAGE
        assert not any(slot.view[:64])
        assert len(slot.view) == LARGEST
    assert all(right.address - left.address >= LARGEST for left, right in pairwise(sorted(slots, key=lambda s: s.index)))
    assert [arena.cells(ring)[count - 1] for ring in (0, 1)] == [0xFFFFFFFF] * 2
    assert nbytes(count) > count * LARGEST


def test_a_slot_is_always_the_same_object_and_begins_at_a_page() -> None:
    arena = arena_of(2)
    assert arena.slot(1) is arena.slot(1)
    assert arena.slot(1).index == 1
    assert arena.slot(1).address % os.sysconf("SC_PAGESIZE") == 0
    assert repr(arena) == "<Arena of 2 slots, 1 used so far>"


def test_what_is_discarded_reads_as_zeros_on_both_sides_and_its_neighbours_stay(twice: tuple[Arena, Arena]) -> None:
    here, there = twice
    for index in range(3):
        here.slot(index).view[:4] = here.slot(index).view[LARGEST - 4 :] = b"full"
        here.slot(index).ticket[:4] = b"told"
    here.slot(1).reserve(2 * SMALLEST)
    here.discard(1)
    assert here.slot(1).capacity == SMALLEST
    for slot in (here.slot(1), there.slot(1)):
        assert bytes(slot.view[:4]) == bytes(slot.view[LARGEST - 4 :]) == bytes(4)
        assert bytes(slot.ticket[:4]) == b"told"
    for index in (0, 2):
        assert bytes(there.slot(index).view[:4]) == bytes(there.slot(index).view[LARGEST - 4 :]) == b"full"


def test_memory_takes_from_the_system_only_what_was_written() -> None:
    descriptor = create(64)
    arena = attach(descriptor, 64)
    arena.slot(63).view[:1] = b"x"
    assert os.fstat(descriptor).st_size >= 64 * LARGEST
    assert os.fstat(descriptor).st_blocks * 512 < 1 << 20
    os.close(descriptor)
