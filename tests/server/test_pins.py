import pytest

from partitions import PartitionError
from server.pins import Pins
from tests.fakes import FakeDevice
from tests.memory import arena_of

KB = 1024


def test_a_slot_is_pinned_once_and_anew_when_it_has_grown() -> None:
    device, slot = FakeDevice(), arena_of(1).slot(0)
    pins = Pins(device.pin)
    for nbytes in (64 * KB, 64 * KB, 128 * KB, 64 * KB):
        pins.cover(slot, nbytes)
    assert [(pin.address, pin.nbytes, pin.closed) for pin in device.pins] == [
        (slot.address, 64 * KB, True),
        (slot.address, 128 * KB, False),
    ]
    assert repr(pins) == f"<Pins of 1 slots, {128 * KB} bytes>"


def test_what_is_dropped_is_let_go_of_and_pinned_again_when_used_again() -> None:
    device, arena = FakeDevice(), arena_of(2)
    pins = Pins(device.pin)
    pins.drop(1)
    for index in (0, 1):
        pins.cover(arena.slot(index), KB)
    pins.drop(0)
    assert [pin.closed for pin in device.pins] == [True, False]
    pins.cover(arena.slot(0), KB)
    assert len(device.pins) == 3


def test_closing_lets_go_of_all() -> None:
    device, arena = FakeDevice(), arena_of(3)
    pins = Pins(device.pin)
    for index in range(3):
        pins.cover(arena.slot(index), KB)
    pins.close()
    pins.close()
    assert all(pin.closed for pin in device.pins)
    assert repr(pins) == "<Pins of 0 slots, 0 bytes>"


def test_a_slot_that_could_not_be_pinned_anew_is_tried_again() -> None:
    device, slot = FakeDevice(), arena_of(1).slot(0)
    refusals = [PartitionError("out of memory")]

    def pin(address: int, nbytes: int) -> object:
        if nbytes > KB and refusals:
            raise refusals.pop()
        return device.pin(address, nbytes)

    pins = Pins(pin)  # type: ignore[arg-type]
    pins.cover(slot, KB)
    with pytest.raises(PartitionError, match="out of memory"):
        pins.cover(slot, 2 * KB)
    assert device.pins[0].closed
    pins.cover(slot, 2 * KB)
    pins.close()
    assert all(pin.closed for pin in device.pins)
