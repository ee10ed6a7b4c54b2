"""How a process ends after an orderly shutdown: what has to run at its exit runs, and the interpreter is not taken down.

Python frees at its end what modules still hold, in an order that libraries written in C need not expect; a crash there would be
the server's exit status.
"""

import atexit
import os
import sys
import threading
from typing import NoReturn

_OUTPUT_LOST = 120
"""Python's own status for output that could not be written at exit."""
_PATIENCE = 5.0
"""Seconds that `leave`, once it has begun, may take before `end_now` ends the process."""

_ending = threading.Lock()
"""Held by the thread that ends the process, until the process has ended."""


def leave(status: int) -> NoReturn:
    """End this process with this status; call it on the main thread.

    As at any exit of Python, threads that are no daemons are waited for, functions registered with `atexit` run (these flush
    the log, remove multiprocessing's directory and save caches and coverage), and standard output and error are flushed. What
    comes after that is left out. A KeyboardInterrupt ends the process at once.
    """
    try:
        _ending.acquire()
        threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing calls it, too, before os._exit.
        atexit._run_exitfuncs()
        if not _flush():
            status = _OUTPUT_LOST
    finally:
        os._exit(status)


def end_now(status: int) -> NoReturn:
    """End this process with this status, from any thread, without what runs at its exit.

    If the main thread is about to `leave`, that goes on for up to 5 seconds first, so that what it writes is whole.
    """
    _ending.acquire(timeout=_PATIENCE)
    os._exit(status)


def _flush() -> bool:
    """Flush standard output and error; False if that failed."""
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            flushed = False
    return flushed
