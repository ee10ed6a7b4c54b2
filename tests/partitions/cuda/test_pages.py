import ctypes
import mmap
from collections.abc import Iterator

import pytest

from partitions.cuda import pages
from partitions.cuda.pages import PIECE, pieces, populate

SIZE = 3 * PIECE + 5 * mmap.PAGESIZE


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, SIZE + 2 * mmap.PAGESIZE) as memory:
        yield memory


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def resident(memory: mmap.mmap) -> list[bool]:
    """Whether the system has provided each page; see mincore(2)."""
    found = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address(memory)), ctypes.c_size_t(len(memory)), found) == 0
    return [bool(page & 1) for page in found]


@pytest.mark.parametrize(
    ("address", "nbytes", "found"),
    [
        (0, 0, []),
        (3, 4, [(3, 4)]),
        (3, 5, [(3, 5)]),
        (3, 6, [(3, 5), (8, 1)]),
        (8, 8, [(8, 8)]),
        (8, 17, [(8, 8), (16, 8), (24, 1)]),
    ],
)
def test_pieces_end_at_multiples_of_their_size(address: int, nbytes: int, found: list[tuple[int, int]]) -> None:
    assert list(pieces(address, nbytes, 8)) == found


@pytest.mark.parametrize("old", [False, True], ids=["this kernel", "an old kernel"])
def test_populate_provides_every_page_and_keeps_its_contents(
    memory: mmap.mmap, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:
        monkeypatch.setattr(pages, "_populate", lambda address, nbytes: False)
    memory[PIECE] = 7
    assert sum(resident(memory)) == 1
    populate(address(memory) + 10, SIZE)
    assert resident(memory) == [True] * (SIZE // mmap.PAGESIZE + 1) + [False]
    assert memory[PIECE] == 7
    assert not any(memory[:PIECE])


def test_memory_that_is_not_the_process_s_is_an_error() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        populate(mmap.PAGESIZE, 10 * mmap.PAGESIZE)


def test_populating_zero_bytes_does_nothing() -> None:
    populate(mmap.PAGESIZE, 0)
