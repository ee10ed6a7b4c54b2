"""The loads of this process over a library of the tests', which notes how they are paced."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from partitions.cuda import kernel_loads
from partitions.cuda.kernel_loads import KERNEL_LOADS


class FakeLibrary:
    """In place of the compiled library: how many times as long as a load took the next one waits, from first to last."""

    def __init__(self) -> None:
        self.rests: list[int] = []

    def kernel_loads_pace(self, rest: int) -> None:
        self.rests.append(rest)

    @property
    def rest(self) -> int:
        return self.rests[-1]


@contextmanager
def paced_process() -> Iterator[FakeLibrary]:
    """This process's loads are paced in the block."""
    made = FakeLibrary()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_loads, "_open", lambda _: made)
        KERNEL_LOADS.open()
        try:
            yield made
        finally:
            KERNEL_LOADS.hurry()
            KERNEL_LOADS._library = None
