"""`gather` copies the rows of several requests into one slot; `split` divides the outputs among them."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import DATATYPES, Signature, TensorMismatch, TensorSpec, wire
from server.link.messages import NOWHERE, Extent
from server.link.slots import Slot
from server.scheduling.batch_runs import Layouts, Member, Shapes, gather, split
from tests.memory import arena_of

FP32, BYTES = DATATYPES["FP32"], DATATYPES["BYTES"]
X, TEXT = TensorSpec("x", FP32, ("b", 3)), TensorSpec("text", BYTES, ("b", 2))
NUMBERS = Signature((X, TensorSpec("z", FP32, ("b",))), (TensorSpec("y", FP32, ("b", 3)),), 64)
MIXED = Signature((TEXT, X), (TEXT, TensorSpec("y", FP32, ("b",))), 64)


def filled(slot: Slot, signature: Signature, rows: int, data: Sequence[bytes]) -> tuple[Slot, Shapes]:
    """A slot and its shapes as the decoder of a request leaves them."""
    for offset, each in zip(slot.lay_out(signature, list(map(len, data))), data, strict=True):
        slot.view[offset : offset + len(each)] = each
    return slot, tuple((rows, *(dim for dim in spec.dims[1:] if isinstance(dim, int))) for spec in signature.inputs)


def gathered(members: Sequence[Member], signature: Signature, into: Slot, layouts: Layouts | None = None) -> Shapes:
    """The shapes of these members' batch, which is in that slot then."""
    layout = (layouts or Layouts()).of("model/1#1", members, signature)
    gather(members, layout, signature, into)
    return layout.shapes


def numbers(rows: int, start: int) -> list[bytes]:
    x = np.arange(start, start + rows * 3, dtype=np.float32)
    return [x.tobytes(), x[:rows].tobytes()]


def texts(rows: int, start: int) -> bytes:
    return wire.pack([b"t" * (start + index) for index in range(rows * 2)])


def found(slot: Slot, signature: Signature, shapes: Shapes) -> list[bytes]:
    tensors, _ = slot.inputs(signature, shapes, slot.capacity)
    return [bytes(slot.view[t.address - slot.address :][: t.nbytes]) for t in tensors]


def test_gather_concatenates_the_rows_of_each_input_where_the_device_side_finds_them() -> None:
    arena = arena_of(4)
    data = [numbers(rows, 10 * rows) for rows in (2, 1, 2)]
    members = [filled(arena.slot(index), NUMBERS, len(each[1]) // 4, each) for index, each in enumerate(data)]
    whole = gathered(members, NUMBERS, arena.slot(3))
    assert whole == ((5, 3), (5,))
    assert found(arena.slot(3), NUMBERS, whole) == [b"".join(column) for column in zip(*data, strict=True)]


def test_gather_refuses_a_batch_that_the_signature_does_not_take() -> None:
    arena = arena_of(3)
    members = [filled(arena.slot(index), NUMBERS, 40, numbers(40, 0)) for index in range(2)]
    with pytest.raises(TensorMismatch, match="batch of 80"):
        gathered(members, NUMBERS, arena.slot(2))


def test_a_layout_that_is_known_serves_other_requests_of_the_same_shapes() -> None:
    arena, layouts = arena_of(9), Layouts()
    for turn, count in enumerate((2, 3, 2)):
        data = [numbers(2, 10 * turn + index) for index in range(count)]
        members = [filled(arena.slot(2 * index + turn % 2), NUMBERS, 2, each) for index, each in enumerate(data)]
        whole = gathered(members, NUMBERS, arena.slot(8), layouts)
        assert whole == ((2 * count, 3), (2 * count,))
        assert found(arena.slot(8), NUMBERS, whole) == [b"".join(column) for column in zip(*data, strict=True)]


def test_no_layout_is_kept_of_texts_whose_lengths_vary() -> None:
    arena, layouts = arena_of(3), Layouts()
    for turn in range(3):
        data = [[texts(1, 5 * turn + index), numbers(1, turn)[0]] for index in range(2)]
        members = [filled(arena.slot(index), MIXED, 1, each) for index, each in enumerate(data)]
        whole = gathered(members, MIXED, arena.slot(2), layouts)
        assert found(arena.slot(2), MIXED, whole) == [b"".join(column) for column in zip(*data, strict=True)]


def written(slot: Slot, *outputs: tuple[tuple[int, ...], bytes]) -> list[Extent]:
    extents, at = [], 128
    slot.reserve(1 << 20)
    for shape, data in outputs:
        slot.view[at : at + len(data)] = data
        extents.append(Extent(shape, at, len(data)))
        at += len(data) + 64
    return extents


def content(slot: Slot, extent: Extent) -> bytes:
    return bytes(slot.view[extent.offset : extent.offset + extent.nbytes])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_split_gives_each_request_its_rows_of_every_output(rows: list[int]) -> None:
    slot, total = SLOTS.slot(0), sum(rows)
    y = np.arange(total, dtype=np.float32)
    elements = [b"e" * index for index in range(total * 2)]
    outputs = written(slot, ((total, 2), wire.pack(elements)), ((total,), y.tobytes()))
    start = 0
    for count, (text, part) in zip(rows, split(outputs, rows, MIXED, slot), strict=True):
        assert (text.shape, part.shape) == ((count, 2), (count,))
        assert wire.unpack(content(slot, text), count * 2) == elements[start * 2 : (start + count) * 2]
        assert content(slot, part) == y[start : start + count].tobytes()
        start += count


def test_split_passes_over_what_no_request_has_asked_for() -> None:
    slot = SLOTS.slot(0)
    (text,) = written(slot, ((2, 2), wire.pack([b"a", b"b", b"c", b"d"])))
    parts = split((text, NOWHERE), [1, 1], MIXED, slot, 0b10)
    assert [(content(slot, words), number) for words, number in parts] == [
        (wire.pack([b"a", b"b"]), NOWHERE),
        (wire.pack([b"c", b"d"]), NOWHERE),
    ]


def test_a_batch_reserves_for_outputs_of_unknown_size_what_its_requests_reserved() -> None:
    arena = arena_of(3)
    texts = Signature((X,), (TensorSpec("y", DATATYPES["BYTES"], ("b",)),), 8)
    members = []
    for index in range(2):
        slot, shapes = filled(arena.slot(index), texts, 1, [bytes(12)])
        slot.reserve(300_000)
        members.append((slot, shapes))
    whole = gathered(members, texts, arena.slot(2))
    assert arena.slot(2).inputs(texts, whole, arena.slot(2).capacity)[1].nbytes >= 2 * (300_000 - 64)


SLOTS = arena_of(1)
