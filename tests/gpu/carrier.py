"""One piece of pinned memory that a partition's own SMs bring to the GPU again and again, as a neighbour that is watched."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from tests.engines.tensors import Memory


class Carrier:
    """Brings one piece of pinned memory to a partition. One thread at a time."""

    def __init__(self, partition: Any, copies: Any, span: tuple[int, int, int]) -> None:
        self._stream = partition.stream
        self._copies = copies
        self._span = span

    def once(self) -> float:
        """Microseconds until it is there. On an attached thread."""
        copies, (source, target, nbytes) = self._copies, self._span
        began = time.perf_counter()
        copies.write(copies.table([(source, target, nbytes), (target, source, 0)]))
        copies.copy_in(self._stream)
        copies.copy_out(self._stream)
        copies.count()
        self._stream.sync()
        return (time.perf_counter() - began) * 1e6


@contextmanager
def carrier(device: Any, granules: Sequence[int], nbytes: int) -> Iterator[tuple[Any, Carrier]]:
    """A partition and its carrier of so many bytes. Blocks."""
    from engines.cuda.copies import open_sm_copies

    with ExitStack() as made:
        partition = made.enter_context(closing(device.carve(granules)))
        memory = Memory(nbytes)
        made.enter_context(closing(device.pin(*memory.room[:2])))
        current = device.make_current()
        target = made.enter_context(closing(current.allocate(nbytes, stream=partition.stream)))
        copier = made.enter_context(closing(open_sm_copies(device, partition.stream, 1, 2)))
        yield partition, Carrier(partition, copier, (memory.room.address, int(target.handle), nbytes))
