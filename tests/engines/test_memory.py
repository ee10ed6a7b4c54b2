import numpy as np
import pytest

from engines.memory import SMALL, copy, view


def test_a_view_shows_and_changes_the_memory_itself() -> None:
    data = np.arange(8, dtype=np.uint8)
    seen = view(data.ctypes.data + 2, 3)
    assert seen.tolist() == [2, 3, 4]
    seen[1] = 99
    assert data.tolist() == [0, 1, 2, 99, 4, 5, 6, 7]
    data[2] = 77
    assert seen.tolist() == [77, 99, 4]


def test_a_view_is_of_plain_writable_bytes() -> None:
    data = np.zeros(2, np.float64)
    seen = view(data.ctypes.data, data.nbytes)
    assert (seen.format, seen.itemsize, seen.nbytes, seen.readonly) == ("B", 1, 16, False)


def test_a_view_of_no_bytes_is_empty_whatever_the_address() -> None:
    assert view(0, 0).nbytes == 0
    assert view(1, 0).tolist() == []


@pytest.mark.parametrize("nbytes", [0, 1, SMALL, SMALL + 1])
def test_copy_copies_exactly_nbytes(nbytes: int) -> None:
    source = np.arange(SMALL + 2, dtype=np.uint32).view(np.uint8)
    to = np.zeros_like(source)
    copy(to.ctypes.data, source.ctypes.data, nbytes)
    assert (to[:nbytes] == source[:nbytes]).all()
    assert not to[nbytes:].any()
