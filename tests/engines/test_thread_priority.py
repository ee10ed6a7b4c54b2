"""Threads that compile run at a lower priority than threads that serve."""

import ctypes
import os
import platform
import struct
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

from engines.thread_priority import NICE, SLICE, lower_priority

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}[platform.machine()]


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def slice_of_this_thread() -> int:
    """Nanoseconds, as the kernel says; 0 before Linux 6.12, which has no slices of a thread's own."""
    found = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(SCHED_GETATTR, 0, found, 48, 0) == 0
    return int(struct.unpack("=IIQiIQQQ", found)[5])


def test_lower_priority_is_for_the_thread_and_those_it_starts() -> None:
    found = []
    before = niceness()

    def inner() -> None:
        thread = Thread(target=lambda: found.append(niceness()))
        thread.start()
        thread.join()

    with ThreadPoolExecutor(1, initializer=lower_priority) as threads:
        threads.submit(inner).result()
        assert threads.submit(niceness).result() == max(before, NICE)
    assert found == [max(before, NICE)]
    assert niceness() == before


def test_a_thread_of_lower_priority_has_a_slice_that_is_longer_than_that_of_threads_that_serve() -> None:
    """So these need not wait for its end when they wake; what it starts has the same."""
    here = slice_of_this_thread()
    with ThreadPoolExecutor(1, initializer=lower_priority) as threads:
        lowered = threads.submit(slice_of_this_thread).result()

    assert (here, lowered) == (0, 0) or here < SLICE == lowered
    assert slice_of_this_thread() == here
