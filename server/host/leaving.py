"""How a process ends: with a status that means something to systemd or a container runtime, in time, and what runs at its exit.

After an orderly shutdown what has to run at its exit runs, and the interpreter is not taken down.
Python frees at its end what modules still hold, in an order that libraries written in C need not expect; a crash there would be
the server's exit status.
"""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from threading import Timer
from typing import NoReturn

NEEDS_RESTART = 70
"""Only a new process can go on (EX_SOFTWARE of sysexits.h): the device was lost, or the event loop hung."""

GAVE_UP = 1
"""A second signal ended the process before all accepted requests were answered."""


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


log = logging.getLogger("greenlane")

ORDERLY = 0.9
"""The part of `drain_timeout` that an orderly shutdown may take; after it the process is ended as it is."""


def end_in_time(grace: float, timeout: float, end: Callable[[], object]) -> Timer:
    """Start a timer that calls `end`, on a thread, if the process is still there when the shutdown should be over.

    `grace` and `timeout` are the seconds of drain_grace and drain_timeout. It is a thread because the event loop may hang, or
    be closed while the interpreter still waits for a thread that does not end. `cancel` of the returned timer stops it.
    """

    def late() -> None:
        log.error("shutdown is not complete after %g s; exiting now", grace + timeout * ORDERLY)
        end()

    timer = Timer(grace + timeout * ORDERLY, late)
    timer.daemon = True
    timer.start()
    return timer


def give_up(requests: int) -> int:
    """Log how many accepted requests a second signal leaves unanswered. Returns the exit status."""
    if not requests:
        return 0
    log.error("second signal: exiting with %d accepted request(s) unanswered", requests)
    return GAVE_UP
