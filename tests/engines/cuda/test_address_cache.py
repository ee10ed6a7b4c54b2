"""The cache of addresses known to be pinned, and when an executor has to ask the driver again."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from engines import Room, Tensor
from engines.memory import view
from tests.engines.simulated import Bench, affine, rows
from tests.engines.tensors import Memory, array


def asked(bench: Bench) -> int:
    """How often the driver was asked which memory an address belongs to."""
    return int(bench.gpu.log.count("cuPointerGetAttributes"))


def right(executor: Any, tensors: list[Tensor], room: Room, data: Any) -> bool:
    (output,) = executor.enqueue(tensors, room).wait()
    return bool((array(output).reshape(data.shape) == affine(data)).all())


def test_memory_that_stays_pinned_is_asked_about_once(bench: Bench, executor: Any) -> None:
    data, room = rows(2), bench.room()
    tensors = bench.pinned(data)
    for _ in range(3):
        assert right(executor, tensors, room, data)
    before = asked(bench)
    for _ in range(40):
        assert right(executor, tensors, room, data)
    assert asked(bench) == before


def test_new_data_in_the_same_memory_is_read(bench: Bench, executor: Any) -> None:
    room, tensors = bench.room(), bench.pinned(rows(2))
    for seed in range(5):
        data = rows(2, seed)
        array_in(tensors[0])[:] = data.tobytes()
        assert right(executor, tensors, room, data)


def test_every_slot_in_flight_has_its_own_route(bench: Bench, executor: Any) -> None:
    given = [(rows(2, seed), bench.room()) for seed in range(6)]
    tensors = [bench.pinned(data) for data, _ in given]
    for _ in range(4):
        works = [executor.enqueue(mine, room) for mine, (_, room) in zip(tensors, given, strict=True)]
        for work, (data, room) in zip(works, given, strict=True):
            (output,) = work.wait()
            assert output.address == room.address
            assert (array(output).reshape(2, 3) == affine(data)).all()


def test_memory_that_was_unpinned_is_staged_again(bench: Bench, executor: Any) -> None:
    data, memory, room = rows(2), Memory(4096), bench.room()
    pin = bench.device.pin(*memory.room[:2])
    memory.bytes[: data.nbytes] = list(data.tobytes())
    tensors = [Tensor(data.shape, memory.room.address, data.nbytes)]
    for _ in range(4):
        assert right(executor, tensors, room, data)
    pin.close()
    assert right(executor, tensors, room, data)  # The simulated GPU is lost if it reads what is not pinned.
    assert not bench.gpu.lost


def test_an_unpinned_room_is_not_written_to(bench: Bench, executor: Any) -> None:
    data, memory = rows(2), Memory(4096)
    pin, tensors = bench.device.pin(*memory.room[:2]), bench.pinned(data)
    for _ in range(4):
        assert right(executor, tensors, memory.room, data)
    pin.close()
    (output,) = executor.enqueue(tensors, memory.room).wait()
    assert not memory.holds(output)
    assert (array(output).reshape(2, 3) == affine(data)).all()


def test_memory_pinned_by_other_code_is_not_cached(bench: Bench, executor: Any) -> None:
    data, memory, room = rows(2), Memory(4096), bench.room()
    bench.gpu.pin(memory.room.address, memory.room.nbytes)
    memory.bytes[: data.nbytes] = list(data.tobytes())
    tensors = [Tensor(data.shape, memory.room.address, data.nbytes)]
    for _ in range(4):
        before = asked(bench)
        assert right(executor, tensors, room, data)
        assert asked(bench) > before
    bench.gpu.unpin(memory.room.address)


def test_more_bytes_than_the_shape_has_are_refused_though_the_memory_is_known(bench: Bench, executor: Any) -> None:
    data, room = rows(2), bench.room()
    (tensor,) = bench.pinned(data)
    for _ in range(4):
        assert right(executor, [tensor], room, data)
    with pytest.raises(Exception, match="28 bytes for shape"):
        executor.enqueue([tensor._replace(nbytes=28)], room)
    assert right(executor, [tensor], room, data)


def test_a_shape_whose_graph_was_evicted_is_prepared_again(
    bench: Bench, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("engines.tensorrt.shapes"), "MAX_READY_SETS", 1)
    one, two, room = rows(1), rows(2), bench.room()
    first, second = bench.pinned(one), bench.pinned(two)
    for _ in range(3):
        for _ in range(4):
            assert right(executor, first, room, one)
        for _ in range(4):
            assert right(executor, second, room, two)


def test_the_cache_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.address_cache, "MAX_ENTRIES", 3)
    cache: Any = bench.address_cache.AddressCache(bench.device)
    resolved = bench.address_cache.ResolvedAddresses(SimpleNamespace(graph="a graph"), (), (), staged=False, padded=False)
    rooms = [Room(1024 * turn, 1024) for turn in range(5)]
    for room in rooms:
        cache.put([], room, resolved)
    assert [cache.get([], room) for room in rooms] == [None, None, resolved, resolved, resolved]


def array_in(tensor: Tensor) -> memoryview:
    return view(tensor.address, tensor.nbytes)
