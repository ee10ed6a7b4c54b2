"""That large blocks are kept: seen by the pages that are not faulted in again."""

import resource
import subprocess
import sys

from server.allocator import KEPT, LARGEST, keep_large_blocks

FAULTS = """
import resource, sys
from server.allocator import keep_large_blocks
if sys.argv[1] == "kept":
    assert keep_large_blocks()
for turn in range(60):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(600_000) for _ in range(3)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_memory_of_large_blocks_is_faulted_in_once() -> None:
    pages = 50 * 3 * 600_000 // resource.getpagesize()
    assert faults("kept") < pages / 20


def test_a_c_library_that_cannot_be_told_is_left_alone() -> None:
    said: list[tuple[int, int]] = []

    def refuse(parameter: int, value: int) -> int:
        said.append((parameter, value))
        return 0

    assert not keep_large_blocks(refuse)
    assert said == [(-3, LARGEST)]


def test_both_settings_are_made() -> None:
    said: dict[int, int] = {}

    def take(parameter: int, value: int) -> int:
        said[parameter] = value
        return 1

    assert keep_large_blocks(take)
    assert said == {-3: LARGEST, -1: KEPT}
