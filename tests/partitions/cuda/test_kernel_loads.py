"""Loads of kernels that leave pauses, over a libcupti of the tests': who waits, for how long, and who ends the pauses."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from engines.cuda.locks import SharedLock, TurnLock
from partitions import DeviceUnavailable
from partitions.c_library import compile_library
from partitions.cuda import kernel_loads
from partitions.cuda.kernel_loads import KERNEL_LOADS, REST, SOURCES, KernelLoads, find_cupti
from tests.partitions.cuda.pacing import FakeLibrary, paced_process

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

ROOT = Path(__file__).parents[3]
STUB = (ROOT / "tests" / "cupti_stub.c",)
PATIENCE = 60.0
LOAD = 2_000_000
"""Nanoseconds of a call."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    made = FakeLibrary()
    monkeypatch.setattr(kernel_loads, "_open", lambda _: made)
    return made


@pytest.fixture
def loads(library: FakeLibrary) -> KernelLoads:
    made = KernelLoads()
    made.open()
    return made


@pytest.fixture
def process_loads() -> Iterator[FakeLibrary]:
    """Those of this process, which the locks hurry."""
    with paced_process() as library:
        yield library


def test_only_loads_in_the_background_leave_pauses(loads: KernelLoads, library: FakeLibrary) -> None:
    with loads.loading():
        assert library.rest == 0
    with loads.background():
        assert library.rest == 0
        with loads.loading():
            assert library.rest == REST
    assert library.rest == 0


def test_an_urgent_load_ends_the_pauses_of_the_others_which_begin_again_after_it(
    loads: KernelLoads, library: FakeLibrary
) -> None:
    urgent = copy_context()
    with loads.background(), loads.loading():
        block = urgent.run(loads.loading)
        block.__enter__()
        assert library.rest == 0
        block.__exit__()
        assert library.rest == REST


def test_what_is_in_the_background_itself_ends_no_pauses(loads: KernelLoads, library: FakeLibrary) -> None:
    with loads.background(), loads.loading(), loads.hurrying():
        assert library.rest == REST


def test_after_hurry_nothing_is_paced_until_it_is_opened_again(loads: KernelLoads, library: FakeLibrary) -> None:
    with loads.background(), loads.loading():
        loads.hurry()
        assert library.rest == 0
        loads.open()
        assert library.rest == REST


def test_what_the_garbage_collector_frees_during_a_change_does_not_wait_for_itself(
    loads: KernelLoads, library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []

    def collecting(rest: int) -> None:
        with loads.freeing():
            freed.append(rest)

    monkeypatch.setattr(library, "kernel_loads_pace", collecting)
    changing = Thread(target=loads.open, daemon=True)
    changing.start()
    changing.join(PATIENCE)
    assert freed == [0]


def test_without_the_compiled_library_or_cupti_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_library(SOURCES)
    with pytest.raises(DeviceUnavailable, match="there is no /nothing; pip install nvidia-cuda-cupti"):
        KernelLoads().open("/nothing")
    with pytest.raises(DeviceUnavailable, match="lacks what this needs"):
        KernelLoads().open("libc.so.6")
    monkeypatch.setattr(kernel_loads, "find_library", lambda _: None)
    with pytest.raises(DeviceUnavailable, match=r"kernel_loads\.c is not compiled; scripts/install"):
        KernelLoads().open("/nothing")
    assert KernelLoads().waited() == 0.0


def test_the_libcupti_of_a_wheel_is_found_before_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_loads, "find_spec", lambda _: None)
    assert find_cupti() == "libcupti.so.13"
    wheel = tmp_path / "nvidia" / "cu13" / "lib" / "libcupti.so.13"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_cupti() == str(wheel)


PACED = """
import ctypes, sys, threading, time
from partitions.cuda.kernel_loads import KernelLoads
stub, loads = ctypes.CDLL(sys.argv[1]), KernelLoads()
loads.open(sys.argv[1])
def call(name, took):
    began = time.monotonic()
    stub.stub_call(ctypes.create_string_buffer(name), ctypes.c_long(took))
    return time.monotonic() - began
call(b"cuKernelGetFunction", 2_000_000)
print("unpaced", loads.waited() == 0.0)
with loads.background(), loads.loading():
    spans, stop = [], threading.Event()
    def several():
        for _ in range(2):
            call(b"cuKernelGetFunction", 2_000_000)
            spans.append(time.monotonic())
    threads = [threading.Thread(target=several) for _ in range(2)]
    for each in threads: each.start()
    print("launches do not wait", call(b"cuGraphLaunch", 0) < 0.1)
    for each in threads: each.join()
    gaps = [later - earlier for earlier, later in zip(sorted(spans), sorted(spans)[1:])]
    print("one at a time, with pauses", len(gaps), min(gaps) >= 0.242)
    began = time.monotonic()
    for _ in range(20):
        call(b"cuLibraryLoadData", 0)
    print("no pauses after short ones", time.monotonic() - began < 1.0)
    call(b"cuKernelGetFunction", 2_000_000)
    waiting = threading.Thread(target=call, args=(b"cuLibraryLoadData", 1_000_000))
    waiting.start()
    waiting.join(0.1)
    print("waits", waiting.is_alive())
    began = time.monotonic()
    loads.hurry()
    waiting.join()
    print("hurried", time.monotonic() - began < 0.1)
calls, took, waited = loads.counts()
print(calls, took >= 11_000_000, waited >= 3 * 240_000_000)
"""


def test_loads_of_several_threads_come_one_at_a_time_with_pauses_and_can_be_hurried() -> None:
    """In a process of its own: CUPTI has one subscriber, for good."""
    assert REST * LOAD / 1e9 == 0.24
    compile_library(SOURCES)
    command = [sys.executable, "-c", PACED, str(compile_library(STUB))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.splitlines() == [
        "unpaced True",
        "launches do not wait True",
        "one at a time, with pauses 3 True",
        "no pauses after short ones True",
        "waits True",
        "hurried True",
        "27 True True",
    ]


def waits(library: FakeLibrary, wait: Any, free: Event) -> list[int]:
    """Have another thread call `wait`, and set `free` once that has changed the pace; all paces from then to its end."""
    thread = Thread(target=wait)
    known = len(library.rests)
    thread.start()
    ends = time.monotonic() + PATIENCE
    while len(library.rests) == known:
        assert time.monotonic() < ends
        time.sleep(0)
    free.set()
    thread.join(PATIENCE)
    return library.rests[known:]


@pytest.mark.parametrize("locks", ["turn", "shared, then exclusive", "exclusive, then shared"])
def test_a_thread_that_waits_for_a_lock_that_a_load_holds_ends_its_pauses(process_loads: FakeLibrary, locks: str) -> None:
    turn, library, free, held = TurnLock(), SharedLock(), Event(), Event()
    holds, asks = {
        "turn": (lambda: turn, lambda: turn),
        "shared, then exclusive": (library.shared, library.exclusive),
        "exclusive, then shared": (library.exclusive, library.shared),
    }[locks]

    def load() -> None:
        with holds(), KERNEL_LOADS.background(), KERNEL_LOADS.loading():
            held.set()
            free.wait(PATIENCE)

    def wait() -> None:
        with asks():
            pass

    with ThreadPoolExecutor(1) as threads:
        threads.submit(load)
        assert held.wait(PATIENCE)
        assert process_loads.rest == REST
        assert waits(process_loads, wait, free)[0] == 0


def test_a_turn_may_be_taken_again_by_the_thread_that_has_it() -> None:
    lock = TurnLock()
    with lock, lock:
        assert repr(lock).startswith("<TurnLock ")
