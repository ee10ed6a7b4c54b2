from functools import partial
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.errors import MemoryFull, TooLarge
from server.link.slots import SMALLEST, Slot
from server.scheduling.slot_pool import SlotPool
from tests.memory import arena_of

MIB = 1 << 20


def pool_of(count: int = 4, nbytes: int = 16 * MIB) -> SlotPool:
    return SlotPool(arena_of(count, nbytes), "tenants.acme.memory")


def test_release_frees_the_memory_of_a_large_request() -> None:
    pool = pool_of()
    slot = pool.acquire()
    slot.reserve(9 * MIB)
    assert pool.statistics().nbytes == slot.capacity == 9 * MIB
    pool.release(slot)
    assert pool.statistics().nbytes == 0
    assert pool.acquire() is slot
    slot.reserve(10)
    assert slot.capacity == SMALLEST


def test_reserve_over_the_budget_raises_memory_full_with_the_numbers() -> None:
    pool = pool_of()
    first, second = pool.acquire(), pool.acquire()
    first.reserve(8 * MIB)
    with pytest.raises(
        MemoryFull,
        match=rf"^the request and its answer need {7 * MIB} bytes of memory in one piece, but requests hold {8 * MIB} and the "
        rf"largest piece left for one is {6 * MIB} \(tenants.acme.memory: {16 * MIB}, of which {2 * MIB} are kept for requests "
        rf"of up to {MIB}\)$",
    ):
        second.reserve(7 * MIB)
    assert second.capacity == 0
    pool.release(first)
    second.reserve(7 * MIB)
    with pytest.raises(TooLarge, match=rf"need {14 * MIB + 1} bytes of memory; the most for one is {14 * MIB} \(tenants.acme"):
        first.reserve(14 * MIB + 1)


def test_a_body_that_is_complete_leaves_its_slot_to_no_other() -> None:
    pool, left = pool_of(2), list[str]()
    complete, arriving = (pool.acquire_early(partial(left.append, name)) for name in ("complete", "arriving"))
    assert complete
    assert arriving
    pool.keep(complete)
    assert pool.evict()
    assert left == ["arriving"]


def test_a_block_that_cannot_be_borrowed_costs_no_slot() -> None:
    pool = pool_of(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="are not in"):
            pool.acquire_foreign(0, 17 * MIB, lambda: None)
    assert pool.acquire().index == 0


class Pools(RuleBasedStateMachine):
    """Slots never overlap, no memory is lost, and the budget is never exceeded."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(40)
        self.held: dict[Slot, bytes] = {}

    @precondition(lambda self: len(self.held) < 40)
    @rule(size=st.integers(0, SMALLEST) | st.integers(0, MIB) | st.integers(0, 16 * MIB))
    def take(self, size: int) -> None:
        slot = self.pool.acquire()
        assert slot not in self.held
        assert slot.capacity == 0
        try:
            slot.reserve(size)
        except (MemoryFull, TooLarge):
            assert slot.capacity == 0
            self.pool.release(slot)
            return
        assert slot.capacity >= size
        self._write(slot, len(self.held))

    @precondition(lambda self: self.held)
    @rule(place=st.integers(0, 39), size=st.integers(0, 8 * MIB), spare=st.integers(0, 8 * MIB))
    def enlarge(self, place: int, size: int, spare: int) -> None:
        slot = list(self.held)[place % len(self.held)]
        before = slot.capacity
        try:
            slot.reserve(size, spare)
        except MemoryFull:
            assert slot.capacity == before
        assert slot.capacity >= before
        assert bytes(slot.view[:8]) == self.held[slot], "what was there is kept"
        self._write(slot, place)

    @precondition(lambda self: self.held)
    @rule(place=st.integers(0, 39))
    def release(self, place: int) -> None:
        slot = list(self.held)[place % len(self.held)]
        del self.held[slot]
        self.pool.release(slot)

    @precondition(lambda self: not self.held)
    @rule()
    def take_all(self) -> None:
        """With no slot in use, the largest block can be reserved again."""
        slot = self.pool.acquire()
        slot.reserve(14 * MIB)
        self.pool.release(slot)

    def _write(self, slot: Slot, number: int) -> None:
        self.held[slot] = bytes([number % 256] * 8)
        slot.view[:8] = slot.view[slot.capacity - 8 :] = self.held[slot]

    @invariant()
    def nothing_overlaps(self) -> None:
        for slot, written in self.held.items():
            assert bytes(slot.view[:8]) == bytes(slot.view[slot.capacity - 8 :]) == written
        blocks = sorted((slot.start, slot.start + slot.capacity) for slot in self.held)
        assert all(left[1] <= right[0] for left, right in pairwise(blocks))
        assert not blocks or blocks[-1][1] <= 16 * MIB

    @invariant()
    def statistics_match_what_is_held(self) -> None:
        statistics = self.pool.statistics()
        assert (statistics.used, statistics.nbytes) == (len(self.held), sum(slot.capacity for slot in self.held))


TestPools = Pools.TestCase
