"""Ends a process that shuts down in time, even if something in it hangs."""

import logging
from collections.abc import Callable
from threading import Timer

from .exit_codes import GAVE_UP

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
