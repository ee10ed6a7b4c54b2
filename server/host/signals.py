"""Starts other processes out of reach of the signals that are meant for this one."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

MEANT_FOR_US = (signal.SIGINT, signal.SIGTERM)
"""What a terminal, or a supervisor, sends to the whole process group; this process then ends the others."""


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Have processes that this thread starts meanwhile get neither SIGINT nor SIGTERM, from their first moment on.

    An interpreter that is still importing ends by them, but a mask is inherited. Other threads are signalled as before.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_US)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
