"""Has a process that was told to end do so in time, whatever hangs in it."""

import logging
from collections.abc import Callable
from threading import Timer

from .exit_codes import GAVE_UP

log = logging.getLogger("greenlane")

ORDER = 0.9
"""What part of `drain_timeout` an orderly end may take; the rest is for what cannot be done in order."""


def end_in_time(grace: float, timeout: float, end: Callable[[], object]) -> Timer:
    """Call `end` on a thread of its own, where the process is still there so many seconds after it was told to end.

    `grace` and `timeout` are those of drain_grace and drain_timeout. A thread, as the event loop may be gone by then, with
    somebody still waiting for a thread that does not come back. Returns what `cancel` undoes.
    """

    def late() -> None:
        log.error("this process has not ended in order %g s after it was told to; it ends now", grace + timeout * ORDER)
        end()

    timer = Timer(grace + timeout * ORDER, late)
    timer.daemon = True
    timer.start()
    return timer


def give_up(requests: int) -> int:
    """Say how many accepted requests a second signal leaves unanswered; returns the status to end with."""
    if not requests:
        return 0
    log.error("told to end a second time: %d accepted request(s) are given up", requests)
    return GAVE_UP
