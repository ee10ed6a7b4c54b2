"""What another process may have written into a link: every reader refuses it as malformed, or reads what cannot harm it."""

import mmap
import os
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import DATATYPES, Signature, TensorSpec
from server.link import activity, arena, occupancy
from server.link import ring as links
from server.link.arena import MESSAGE
from server.link.encoding import Serializer, decode_outcome, decode_request, encode_outcome
from server.link.messages import Malformed, Ticket
from server.link.ring import Descriptors, Link

SLOTS, MEMORY = 4, 1 << 20
KEY = "m/1#1"
FP32, BYTES = DATATYPES["FP32"], DATATYPES["BYTES"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n", "m")), TensorSpec("t", BYTES, ("k",))), ())
EDGES = st.sampled_from([0, 1, SLOTS, SLOTS + 1, MEMORY, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1])
WORDS = EDGES | st.integers(0, (1 << 64) - 1)
BYTES_ANYWHERE = st.tuples(st.integers(0, arena.nbytes(SLOTS) - 8), WORDS)
IN_RINGS = st.tuples(st.integers(0, 2 * SLOTS + 3).map(lambda cell: 4 * cell), WORDS)
IN_HEADS = st.tuples(
    st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 60)).map(lambda at: arena.nbytes(0) + at[0] * 2 * MESSAGE + at[1]),
    WORDS,
)
COUNTS = st.lists(EDGES.filter(lambda count: count < (1 << 64) - 1) | st.integers(0, 9), max_size=2)


def written(descriptors: Descriptors, damage: list[tuple[int, int]], counts: list[int]) -> None:
    """Write these words at these places of the arena, and add these to the count of tickets, as far as that is possible."""
    for at, word in damage:
        os.pwrite(descriptors.arena, word.to_bytes(8, "little"), at)
    os.set_blocking(descriptors.tickets, False)
    for count in counts:
        with suppress(BlockingIOError):
            os.eventfd_write(descriptors.tickets, count)
    os.set_blocking(descriptors.tickets, True)


def asked(*shapes: tuple[int, ...]) -> bytes:
    """What a ticket's page says of these inputs."""
    return Serializer(decode_request).encode((KEY, shapes, 0, 0, False))


def run(link: Link, ticket: Ticket) -> None:
    """What a worker does with a ticket before the model: its tensors are in the tenant's memory, or it is refused."""
    memory, slot = link.arena.memory, link.arena.slot(ticket.slot)
    try:
        slot.use_block(ticket.start, ticket.capacity)
        tensors, room = slot.inputs(SIGNATURE, ticket.shapes, ticket.capacity)
    except ValueError:
        return
    for tensor in tensors:
        assert memory.address <= tensor.address <= tensor.address + tensor.nbytes <= memory.address + memory.nbytes
    assert room.address - memory.address + max(0, room.nbytes) <= memory.nbytes + 64


@given(st.lists(BYTES_ANYWHERE | IN_RINGS | IN_HEADS, max_size=6), COUNTS, st.lists(WORDS, max_size=3))
def test_a_damaged_ring_is_malformed_or_its_tickets_stay_in_the_tenants_memory(
    damage: list[tuple[int, int]], counts: list[int], sizes: list[int]
) -> None:
    descriptors = links.create(SLOTS, MEMORY)
    try:
        near, far = (links.attach(descriptors) for _ in range(2))
        far.tickets.open()
        for slot, size in enumerate(sizes):
            near.tickets.write(Ticket(slot, slot + 1, KEY, ((size, 1), (2,)), float("inf"), 4096, slot * 4096))
        near.tickets.put([Ticket(slot, 0, KEY, (), 0.0, 0) for slot in range(len(sizes))])
        written(descriptors, damage, counts)
        taken = 0
        with suppress(Malformed):
            while (far.tickets.peek() is not None) and (ticket := far.tickets.poll()) is not None:
                taken += 1
                assert ticket.slot < SLOTS
                assert all(size >= 0 for shape in ticket.shapes for size in shape)
                run(far, ticket)
        assert taken <= SLOTS
    finally:
        descriptors.close()


@given(st.binary(max_size=200) | st.binary(max_size=30).map(lambda tail: asked((1, 2), (3,))[:-10] + tail))
def test_any_bytes_are_a_ticket_or_malformed(data: bytes) -> None:
    try:
        model, shapes, priority, unasked, begun = decode_request(data)
    except Malformed:
        return
    assert isinstance(model, str)
    assert isinstance(priority, int)
    assert unasked >= 0
    assert type(begun) is bool
    assert all(type(size) is int and size >= 0 for shape in shapes for size in shape)


@given(st.binary(max_size=200) | st.binary(max_size=30).map(lambda tail: encode_outcome((((1, 2), 0, 8),), None)[:-4] + tail))
def test_any_bytes_are_a_completion_or_malformed(data: bytes) -> None:
    try:
        outputs, failure, rows = decode_outcome(data)
    except Malformed:
        return
    assert rows >= 0
    assert failure is None or isinstance(failure.text, str)
    assert all(extent.offset >= 0 and extent.nbytes >= 0 for extent in outputs)


LYING: dict[str, bytes] = {
    "four thousand million shapes": b"\x93\xa1m\xdd\xff\xff\xff\xff",
    "as many sizes": b"\x93\xa1m\x91\xdd\xff\xff\xff\xff",
    "a model's name of as many bytes": b"\x93\xdb\xff\xff\xff\xff",
    "arrays in arrays": b"\x93\xa1m" + b"\x91" * 8000,
    "a size below 0": b"\x93\xa1m\x91\x91\xff\x00",
    "a name that is not UTF-8": b"\x93\xa1\xff\x90\x00",
    "more behind it": asked() + b"\x00",
    "marshal": b"(\x03\x00\x00\x00",
    "nothing": b"",
}


@pytest.mark.parametrize("said", LYING)
def test_lengths_that_are_not_so_are_malformed_and_take_no_memory(said: str) -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    before = resident()
    with pytest.raises(Malformed, match="does not decode"):
        decode_request(LYING[said])
    assert resident() - before < 16 << 20


@pytest.mark.parametrize("create", [lambda: arena.create(4), lambda: arena.create_memory(1 << 20), lambda: activity.create(3)])
def test_memory_that_processes_share_keeps_its_size(create: Any) -> None:
    """A process that could cut it off could end the others that map it, by SIGBUS."""
    descriptor = create()
    try:
        size = os.fstat(descriptor).st_size
        for other in (0, size - 1, size + 1):
            with pytest.raises(PermissionError):
                os.truncate(descriptor, other)
        os.pwrite(descriptor, b"x", size - 1)
    finally:
        os.close(descriptor)


def test_the_page_of_a_tenants_processes_keeps_its_size() -> None:
    descriptor = occupancy.create(1 << 20)
    try:
        with pytest.raises(PermissionError):
            os.truncate(descriptor, 0)
    finally:
        os.close(descriptor)


def test_a_lender_that_claims_many_processes_is_read_no_further_than_its_page() -> None:
    descriptor = activity.create(2)
    try:
        os.pwrite(descriptor, b"\xff" * mmap.PAGESIZE, 0)
        page = activity.LenderPage(descriptor, 0)
        assert len(page.processes) == 64
        assert not page.rests()
    finally:
        os.close(descriptor)


def test_a_full_descriptor_of_completions_is_malformed() -> None:
    descriptors = links.create(SLOTS, MEMORY)
    try:
        link = links.attach(descriptors)
        os.eventfd_write(descriptors.completions, (1 << 64) - 2)
        with pytest.raises(Malformed):
            link.completions.report_deferred(1)
    finally:
        descriptors.close()
