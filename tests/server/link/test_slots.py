import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import DATATYPES, Room, Signature, Tensor, TensorSpec
from engines.memory import view
from engines.signature import ALIGNMENT
from server.errors import Outgrown
from server.link.blocks import BlockAllocator
from server.link.messages import NOWHERE, Extent
from server.link.slots import SMALLEST, Slot
from tests.interpreter import Watcher
from tests.memory import arena_of, slot_of

TENSORS = st.lists(
    st.tuples(st.sampled_from(sorted(DATATYPES)), st.integers(0, 300) | st.integers(SMALLEST - 200, SMALLEST + 200)), max_size=5
)


def signature(*datatypes: str) -> Signature:
    return Signature(tuple(TensorSpec(f"x{n}", DATATYPES[name], ("",)) for n, name in enumerate(datatypes)), ())


def laid_out(tensors: Sequence[tuple[str, int]]) -> tuple[Signature, list[int], list[tuple[int, ...]]]:
    """The signature of such inputs, their sizes in bytes, and shapes; that of a BYTES tensor does not determine its size."""
    made = signature(*(name for name, _ in tensors))
    return made, [count * (DATATYPES[name].size or 1) for name, count in tensors], [(count,) for _, count in tensors]


def pattern(length: int, seed: int) -> bytes:
    return bytes((np.arange(length) * 7 + seed).astype(np.uint8))


def content(slot: Slot, extents: Sequence[Extent]) -> list[bytes]:
    return [bytes(slot.view[extent.offset : extent.offset + extent.nbytes]) for extent in extents]


def outside(data: bytes) -> Tensor:
    """A tensor in memory of its own."""
    return Tensor.of(np.frombuffer(data, np.uint8))


def inside(slot: Slot, offset: int, data: bytes) -> Tensor:
    """A tensor in the slot."""
    slot.view[offset : offset + len(data)] = data
    return Tensor((len(data),), slot.address + offset, len(data))


def filled(nbytes: int = 4 * SMALLEST) -> Slot:
    """A slot with a block of so many bytes."""
    slot = slot_of()
    slot.reserve(nbytes)
    return slot


def room_from(slot: Slot, offset: int) -> Room:
    return Room(slot.address + offset, slot.capacity - offset)


@given(TENSORS, st.integers(0, 2 * SMALLEST))
def test_both_sides_find_the_same_tensors_from_signature_and_shapes_alone(tensors: list[tuple[str, int]], space: int) -> None:
    slot = slot_of()
    made, sizes, shapes = laid_out(tensors)
    offsets = slot.lay_out(made, sizes, space)
    for seed, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        slot.view[offset : offset + size] = pattern(size, seed)
    found, room = slot.inputs(made, shapes, slot.capacity)
    assert [tensor.address - slot.address for tensor in found] == offsets
    assert [tensor.shape for tensor in found] == shapes
    assert [bytes(view(t.address, t.nbytes)) for t in found] == [pattern(size, seed) for seed, size in enumerate(sizes)]
    assert room.nbytes >= space
    assert room.address + room.nbytes == slot.address + slot.capacity


@given(TENSORS)
def test_tensors_are_aligned_and_none_overlaps_another(tensors: list[tuple[str, int]]) -> None:
    slot = slot_of()
    made, sizes, shapes = laid_out(tensors)
    offsets = slot.lay_out(made, sizes)
    _, room = slot.inputs(made, shapes, slot.capacity)
    starts = [slot.address + offset for offset in offsets]
    assert all(start % ALIGNMENT == 0 for start in [*starts, room.address])
    ends = [slot.address, *(start + size for start, size in zip(starts, sizes, strict=True))]
    assert all(end <= start for end, start in zip(ends, [*starts, room.address], strict=True))


def test_reserve_keeps_a_block_that_is_large_enough() -> None:
    slot = slot_of()
    slot.reserve(10)
    before = slot.address
    slot.reserve(SMALLEST)
    assert (slot.address, slot.capacity) == (before, SMALLEST)


def test_a_slot_frees_its_block_when_it_grows_and_on_free_block() -> None:
    arena = arena_of(2)
    blocks = arena.slot(0).blocks
    assert isinstance(blocks, BlockAllocator)
    arena.slot(0).reserve(10)
    arena.slot(0).reserve(10 * SMALLEST)
    assert blocks.used == arena.slot(0).capacity == 10 * SMALLEST
    arena.slot(0).free_block()
    arena.slot(0).free_block()
    assert (blocks.used, arena.slot(0).capacity) == (0, 0)


def test_outputs_that_do_not_fit_raise_outgrown_with_the_size_and_write_nothing() -> None:
    slot = filled(SMALLEST)
    slot.view[:] = b"i" * SMALLEST
    with pytest.raises(Outgrown) as raised:
        slot.store_outputs([outside(b"x" * 65), outside(b"y" * 3)], Room(slot.address + SMALLEST - 128, 128))
    assert raised.value.nbytes == SMALLEST + 3
    assert bytes(slot.view) == b"i" * SMALLEST
    extents = slot.store_outputs([outside(b"x" * 64), outside(b"y" * 64)], Room(slot.address + SMALLEST - 128, 128))
    assert content(slot, extents) == [b"x" * 64, b"y" * 64]


def test_outputs_already_in_the_room_are_not_copied() -> None:
    slot = filled()
    before = slot.address
    outputs = [inside(slot, 128, b"abc"), inside(slot, 64, b"de")]
    assert slot.store_outputs(outputs, room_from(slot, 64)) == (Extent((3,), 128, 3), Extent((2,), 64, 2))
    assert slot.address == before


def test_the_outputs_of_the_run_before_are_where_they_were_and_elsewhere_in_another_block() -> None:
    slot = filled()
    outputs = (inside(slot, 128, b"abc"), inside(slot, 64, b"de"))
    expected = (Extent((3,), 128, 3), Extent((2,), 64, 2))
    first = slot.store_outputs(outputs, room_from(slot, 64))
    assert first == expected
    assert slot.store_outputs(outputs, room_from(slot, 64)) is first
    slot.use_block(slot.start + 64, slot.capacity - 64)
    assert slot.store_outputs(outputs, room_from(slot, 64)) == (Extent((3,), 64, 3), Extent((2,), 0, 2))
    slot.use_block(slot.start - 64, 128)
    stored = slot.store_outputs(outputs[1:], room_from(slot, 96))
    assert content(slot, stored) == [b"de"]
    with pytest.raises(Outgrown):
        slot.store_outputs(outputs, room_from(slot, 128))


def test_empty_outputs_may_have_any_address() -> None:
    slot = filled()
    extents = slot.store_outputs([Tensor((0,), 0, 0), outside(b"a")], room_from(slot, 64))
    assert content(slot, extents) == [b"", b"a"]


def test_outputs_that_are_not_asked_for_are_nowhere_and_not_copied() -> None:
    slot = filled()
    outputs = [outside(b"a" * 99), inside(slot, 64, b"bc"), outside(b"d" * (5 * SMALLEST)), outside(b"e")]
    extents = slot.store_outputs(outputs, room_from(slot, 64)._replace(unasked=0b101))
    assert extents == (NOWHERE, Extent((2,), 64, 2), NOWHERE, Extent((1,), 128, 1))
    assert content(slot, extents) == [b"", b"bc", b"", b"e"]


def test_an_output_that_aliases_an_input_is_not_copied() -> None:
    slot = slot_of()
    made = signature("UINT8")
    slot.lay_out(made, [200], 4 * SMALLEST)
    slot.view[:200] = pattern(200, 3)
    (tensor,), room = slot.inputs(made, [(200,)], slot.capacity)
    extents = slot.store_outputs([outside(pattern(3 * SMALLEST, 1)), tensor], room)
    assert extents[1] == Extent((200,), 0, 200)
    assert content(slot, extents) == [pattern(3 * SMALLEST, 1), pattern(200, 3)]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 200) | st.integers(SMALLEST - 9, SMALLEST + 9)), max_size=5),
    st.integers(0, 3),
)
def test_outputs_inside_the_room_and_elsewhere_are_all_stored_whole(plan: list[tuple[bool, int]], blocks: int) -> None:
    slot = filled()
    start = end = ALIGNMENT * blocks
    outputs, expected = [], []
    slot.reserve(start + sum(size + ALIGNMENT for _, size in plan))
    for seed, (here, size) in enumerate(plan):
        expected.append(pattern(size, seed))
        outputs.append(inside(slot, end, expected[-1]) if here else outside(expected[-1]))
        end += (size + ALIGNMENT) // ALIGNMENT * ALIGNMENT if here else 0
    extents = slot.store_outputs(outputs, room_from(slot, start))
    assert content(slot, extents) == expected
    assert all(extent.offset % ALIGNMENT == 0 for extent in extents)
    taken = sorted((extent.offset, extent.nbytes) for extent in extents if extent.nbytes)
    assert all(left + size <= right for (left, size), (right, _) in pairwise(taken))


def test_large_outputs_are_copied_without_the_gil() -> None:
    nbytes = 1 << 26
    slot = slot_of(nbytes=2 * nbytes)
    slot.reserve(nbytes)
    output = outside(np.ones(nbytes, np.uint8).tobytes())
    with Watcher() as watcher:
        began = time.thread_time()
        (extent,) = slot.store_outputs([output], room_from(slot, 0))
        took = time.thread_time() - began
    assert watcher.longest < took / 2
    assert np.frombuffer(slot.view, np.uint8)[extent.offset : extent.offset + nbytes].all()


def test_reserve_copies_to_a_larger_block_without_the_gil() -> None:
    nbytes = 1 << 26
    slot = slot_of(nbytes=4 * nbytes)
    slot.reserve(nbytes)
    np.frombuffer(slot.view, np.uint8)[:] = 1
    with Watcher() as watcher:
        began = time.thread_time()
        slot.reserve(2 * nbytes)
        took = time.thread_time() - began
    assert watcher.longest < took / 2
    assert np.frombuffer(slot.view, np.uint8)[:nbytes].all()
