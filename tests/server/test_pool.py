import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.errors import QueueFull
from server.pool import SlotPool, SlotStatistics
from server.slots import SMALLEST, Slot
from server.ticket import Done, Extent
from tests.memory import arena_of


def pool_of(count: int = 4, keep: int = 256 << 20) -> tuple[SlotPool, list[int]]:
    """A pool, and the slots that it wants retired."""
    retiring: list[int] = []
    return SlotPool(arena_of(count), retiring.append, keep), retiring


def test_a_pool_makes_slots_when_they_are_needed_and_numbers_them() -> None:
    pool, _ = pool_of()
    assert pool.statistics() == SlotStatistics(used=0, slots=0, nbytes=0)
    assert [pool.acquire().index for _ in range(3)] == [0, 1, 2]
    assert pool.statistics() == SlotStatistics(used=3, slots=3, nbytes=3 * SMALLEST)
    assert repr(pool) == "<SlotPool 3 of 3 in use>"


def test_the_slot_that_was_given_back_last_is_used_first() -> None:
    pool, _ = pool_of()
    first, second = pool.acquire(), pool.acquire()
    pool.release(second)
    pool.release(first)
    assert pool.acquire() is first
    assert pool.acquire() is second
    assert pool.acquire().index == 2


def test_what_is_large_gets_the_free_slot_that_grew_most_or_a_fresh_one() -> None:
    pool, _ = pool_of(2)
    large, small = pool.acquire_large(), pool.acquire_large()
    large.reserve(2 * SMALLEST)
    pool.release(large)
    pool.release(small)
    assert pool.acquire_large() is large
    assert pool.at(large.index) is large
    assert pool.acquire_large() is small
    with pytest.raises(QueueFull):
        pool.acquire_large()


def test_when_all_are_in_use_one_more_is_refused_until_one_is_given_back() -> None:
    pool, _ = pool_of(2)
    slots = [pool.acquire(), pool.acquire()]
    with pytest.raises(QueueFull, match=r"^all 2 slots are in use$"):
        pool.acquire()
    pool.release(slots[0])
    assert pool.acquire() is slots[0]


def idle(pool: SlotPool) -> None:
    """As long a time as it takes to see that nobody needs a slot."""
    pool.tidy()
    pool.tidy()


def test_grown_memory_beyond_the_budget_is_retired_when_nobody_needed_it_for_a_while() -> None:
    pool, retiring = pool_of(keep=5 * SMALLEST)
    small, large, huge = pool.acquire(), pool.acquire(), pool.acquire()
    large.reserve(4 * SMALLEST)
    huge.reserve(8 * SMALLEST)
    huge.view[:4] = b"mine"
    pool.release(huge)
    pool.tidy()
    assert retiring == [], "it was in use a moment ago"
    pool.tidy()
    assert retiring == [huge.index]
    assert pool.statistics().used == 2
    assert pool.acquire() is not huge, "it is not free before the device let go of it"
    pool.retired(huge.index)
    assert huge.capacity == SMALLEST
    assert bytes(huge.view[:4]) == bytes(4), "its memory was given back"
    assert pool.acquire() is huge
    pool.release(huge)
    pool.release(small)
    pool.release(large)
    idle(pool)
    assert retiring == [huge.index, large.index]


def test_of_more_than_is_to_be_kept_the_slots_that_are_used_least_go() -> None:
    pool, retiring = pool_of(keep=5 * SMALLEST)
    slots = [pool.acquire() for _ in range(3)]
    for slot in slots:
        slot.reserve(2 * SMALLEST)
    for slot in slots:
        pool.release(slot)
    idle(pool)
    assert retiring == [slots[0].index]


def test_memory_that_is_needed_all_the_time_is_kept_whatever_it_is() -> None:
    pool, retiring = pool_of(keep=0)
    for _ in range(3):
        slot = pool.acquire()
        slot.reserve(4 * SMALLEST)
        pool.release(slot)
        pool.tidy()
    assert retiring == []


def test_memory_within_the_budget_stays_with_its_slot() -> None:
    pool, retiring = pool_of(keep=5 * SMALLEST)
    slot = pool.acquire()
    slot.reserve(2 * SMALLEST)
    pool.release(slot)
    idle(pool)
    assert retiring == []
    assert (pool.acquire(), slot.capacity) == (slot, 2 * SMALLEST)


def test_a_slot_that_the_device_side_let_grow_counts_as_grown() -> None:
    pool, retiring = pool_of(keep=0)
    slot = pool.acquire()
    pool.heard(Done(slot.index, (Extent((1,), 0, 1), Extent((2,), SMALLEST - 1, 1)), None, 1, 2))
    assert slot.capacity == SMALLEST
    pool.heard(Done(slot.index, (Extent((1,), 0, 1), Extent((2,), SMALLEST - 1, 2)), None, 1, 2))
    assert slot.capacity == 2 * SMALLEST
    pool.release(slot)
    idle(pool)
    assert retiring == [slot.index]


class Pools(RuleBasedStateMachine):
    """A slot is never in two hands, none is lost, and what is free stays within the budget or is small."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.retiring = pool_of(4, keep=6 * SMALLEST)
        self.held: list[Slot] = []

    @precondition(lambda self: len(self.held) + len(self.retiring) < 4)
    @rule(size=st.integers(1, 6 * SMALLEST))
    def acquire(self, size: int) -> None:
        slot = self.pool.acquire()
        assert slot not in self.held
        assert slot.index not in self.retiring
        slot.reserve(size)
        self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule(place=st.integers(0, 3))
    def release(self, place: int) -> None:
        self.pool.release(self.held.pop(place % len(self.held)))

    @rule()
    def tidy(self) -> None:
        self.pool.tidy()

    @precondition(lambda self: self.retiring)
    @rule()
    def retire(self) -> None:
        self.pool.retired(self.retiring.pop(0))

    @invariant()
    def it_counts_right(self) -> None:
        assert self.pool.statistics().used == len(self.held)


TestPools = Pools.TestCase
