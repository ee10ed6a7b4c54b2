import ctypes
import time

import numpy as np

from tests.interpreter import Watcher


def compute(library: type[ctypes.CDLL]) -> float:
    """Write 256 MiB of fresh memory in one call, with the interpreter (PyDLL) or without (CDLL); the seconds it computed."""
    memset = library(None).memset
    memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    data = np.empty(1 << 28, np.uint8)
    began = time.thread_time()
    memset(data.ctypes.data, 1, data.nbytes)
    return time.thread_time() - began


def test_a_call_that_keeps_the_interpreter_is_seen_for_as_long_as_it_computes() -> None:
    with Watcher() as watcher:
        took = compute(ctypes.PyDLL)
    assert watcher.longest > 0.5 * took


def test_a_call_that_lets_go_of_the_interpreter_is_not_seen() -> None:
    with Watcher() as watcher:
        took = compute(ctypes.CDLL)
    assert watcher.longest < 0.5 * took
