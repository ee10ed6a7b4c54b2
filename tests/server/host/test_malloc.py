"""That large blocks are kept, seen by the pages that are not faulted in again, and given back when there is nothing to do."""

import resource
import subprocess
import sys

from server.host.malloc import KEPT, LARGEST, SPARE, Tidy, keep_large_blocks, share_one_heap

FAULTS = """
import resource, sys
from server.host.malloc import keep_large_blocks
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


def test_a_c_library_without_mallopt_is_left_alone() -> None:
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


TRIMMED = """
from server.host.malloc import give_back, keep_large_blocks, own_bytes
assert keep_large_blocks()
before = own_bytes()
blocks = [bytearray(b"x" * 600_000) for _ in range(200)]
last = bytearray(600_000)
del blocks
kept = own_bytes() - before
give_back()
print(kept, own_bytes() - before)
"""


def test_what_is_free_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", TRIMMED], capture_output=True, text=True, check=True)
    kept, left = map(int, done.stdout.split())
    assert kept > 100_000_000
    assert left < 10_000_000


class Memory:
    """What a process did and has, and what it gives back."""

    def __init__(self) -> None:
        self.work = 0
        self.resident = 100
        self.used = 100
        self.trimmed = 0
        self.tidy = Tidy(lambda: self.work, lambda: self.resident, self.trim)

    def trim(self) -> None:
        self.trimmed += 1
        self.resident = self.used


def test_much_is_given_back_once_nothing_was_done_since_the_last_look() -> None:
    memory = Memory()
    memory.work, memory.resident = 1, 100 + SPARE + 1
    memory.tidy.look()
    assert memory.trimmed == 0, "it works"
    memory.tidy.look()
    memory.tidy.look()
    assert (memory.trimmed, memory.resident) == (1, 100)


def test_little_is_kept_and_so_is_what_is_in_use() -> None:
    memory = Memory()
    memory.resident = 100 + SPARE
    for _ in range(3):
        memory.tidy.look()
    assert memory.trimmed == 0
    memory.resident = memory.used = 100 + 2 * SPARE
    for _ in range(3):
        memory.tidy.look()
    assert memory.trimmed == 1, "it was tried, and nothing was free"


HEAPS = """
import ctypes, sys, threading
from pathlib import Path
from server.host.malloc import share_one_heap
if sys.argv[1] == "one":
    assert share_one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
found, together = [], threading.Barrier(4)
def take():
    together.wait()
    found.append(libc.malloc(5000) >> 26)  # A heap of a thread's is 64 MiB, and begins at a multiple of that.
    together.wait()
threads = [threading.Thread(target=take) for _ in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
heap = next(line for line in Path("/proc/self/maps").read_text().splitlines() if "[heap]" in line)
first, last = (int(part, 16) >> 26 for part in heap.split()[0].split("-"))
print(sum(not first <= each <= last for each in set(found)))
"""


def test_threads_take_memory_from_one_heap() -> None:
    heaps = {
        how: int(subprocess.run([sys.executable, "-c", HEAPS, how], capture_output=True, check=True).stdout)
        for how in ("one", "many")
    }
    assert heaps["one"] == 0
    assert heaps["many"] > 1, "then the setting is not needed"


def test_a_c_library_that_has_one_heap_is_left_alone() -> None:
    assert not share_one_heap(lambda *_: 0)
