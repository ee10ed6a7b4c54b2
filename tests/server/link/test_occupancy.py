"""Tensor memory that several processes allocate: no byte is held twice, and what a process that ended held can be freed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import MemoryFull, TooLarge
from server.link import occupancy as occupancies
from server.link.blocks import LARGE, UNIT, BlockAllocator
from server.link.occupancy import ARRIVING, CONNECTIONS, LARGE_BODIES, LEAD, Occupancy, SharedBlocks

MIB = 1 << 20
SIZE = 16 * MIB


@pytest.fixture
def processes() -> Iterator[list[Occupancy]]:
    """A lead and two helpers."""
    page = occupancies.create(SIZE)
    yield [Occupancy(page, number) for number in (LEAD, 2, 3)]
    os.close(page)


@pytest.fixture
def shared(processes: list[Occupancy]) -> list[SharedBlocks]:
    """Their allocators."""
    return [SharedBlocks(SIZE, "memory", each) for each in processes]


@given(st.data())
def test_blocks_of_all_processes_are_apart_and_a_dead_ones_are_free_again(data: st.DataObject) -> None:
    page = occupancies.create(SIZE)
    processes = [Occupancy(page, number) for number in (LEAD, 2, 3)]
    blocks = [SharedBlocks(SIZE, "memory", each) for each in processes]
    held: list[list[tuple[int, int]]] = [[], [], []]
    for _ in range(data.draw(st.integers(1, 30))):
        who, what = data.draw(st.integers(0, 2)), data.draw(st.sampled_from(["take", "take", "free", "end"]))
        if what == "take":
            try:
                held[who].append(blocks[who].allocate(data.draw(st.integers(1, 4 * MIB))))
            except MemoryFull:
                assert sum(size for each in held for _, size in each) > MIB
        elif what == "free" and held[who]:
            blocks[who].free(*held[who].pop(data.draw(st.integers(0, len(held[who]) - 1))))
        elif what == "end" and who:
            processes[0].free_all_of(who + 1)
            held[who], blocks[who] = [], SharedBlocks(SIZE, "memory", processes[who])
        taken = sorted(block for each in held for block in each)
        assert all(start + size <= after for (start, size), (after, _) in pairwise(taken))
        assert all(start >= SIZE // 8 for start, size in taken if size > LARGE)
        assert processes[0].used() == sum(size for _, size in taken)
        assert [each.used for each in blocks] == [sum(size for _, size in each) for each in held]
    os.close(page)


def test_it_refuses_what_a_single_process_refuses_with_the_same_words(shared: list[SharedBlocks]) -> None:
    alone = BlockAllocator(SIZE, "memory")
    for blocks in (alone, shared[1]):
        with pytest.raises(TooLarge, match=f"the most for one is {14 * MIB} "):
            blocks.check(SIZE)
    shared[0].allocate(10 * MIB)
    alone.allocate(10 * MIB)
    with pytest.raises(MemoryFull) as expected:
        alone.allocate(5 * MIB)
    with pytest.raises(MemoryFull) as raised:
        shared[1].allocate(5 * MIB)
    assert str(raised.value) == str(expected.value).replace(f"hold {10 * MIB} ", "hold 0 ")


def test_bodies_that_are_still_arriving_get_no_more_than_half_of_it(shared: list[SharedBlocks]) -> None:
    for at in range(9):
        shared[at % 2].allocate(MIB, evict=False)
    with pytest.raises(MemoryFull, match="before it is complete"):
        shared[2].allocate(MIB, evict=False)
    shared[2].allocate(4 * MIB)


def test_arriving_bodies_are_added_up(processes: list[Occupancy]) -> None:
    lead, *helpers = processes
    for number, each in enumerate((lead, *helpers)):
        each.set(ARRIVING, 10**number)
    assert [lead.elsewhere(ARRIVING), helpers[0].elsewhere(ARRIVING)] == [110, 101]
    lead.free_all_of(2)
    assert lead.elsewhere(ARRIVING) == 100
    lead.set_queue_is_full(True)
    assert helpers[1].queue_is_full


def test_connections_and_large_bodies_of_a_process_that_ended_count_no_more(processes: list[Occupancy]) -> None:
    lead, ended, _ = processes
    ended.set(CONNECTIONS, 3)
    ended.set(LARGE_BODIES, 2)
    assert (lead.elsewhere(CONNECTIONS), lead.elsewhere(LARGE_BODIES)) == (3, 2)
    lead.free_all_of(ended.number)
    assert (lead.elsewhere(CONNECTIONS), lead.elsewhere(LARGE_BODIES)) == (0, 0)


HOLDS_THE_LOCK = """
import fcntl, sys
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


def test_a_process_that_holds_the_lock_for_longer_than_usual_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take its core away meanwhile. Requests were refused then, as if there were no memory."""
    page = occupancies.create(SIZE)
    blocks = SharedBlocks(SIZE, "memory", Occupancy(page, LEAD))
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(page)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[page], bufsize=0) as process:
        assert process.stdout
        process.stdout.readline()

        def release(_: float) -> None:
            """In place of the first pause."""
            assert process.stdin
            assert process.stdout
            if not process.stdin.closed:
                process.stdin.close()
                process.stdout.read()

        monkeypatch.setattr(occupancies, "sleep", release)
        assert blocks.allocate(1) == (0, UNIT)
    os.close(page)


def test_a_process_that_is_stopped_or_killed_with_the_lock_blocks_no_other_one() -> None:
    page = occupancies.create(SIZE)
    blocks = SharedBlocks(SIZE, "memory", Occupancy(page, LEAD))
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(page)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[page]) as process:
        assert process.stdout
        process.stdout.readline()
        with pytest.raises(MemoryFull):
            blocks.allocate(1)
        process.kill()
        process.wait()
        assert blocks.allocate(1) == (0, UNIT)
    os.close(page)
