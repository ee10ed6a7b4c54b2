"""Starts child processes with the signals blocked that are meant for this process."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_FOR_PARENT = (signal.SIGINT, signal.SIGTERM)
"""Sent to the whole process group by terminals and some service managers; this process then ends its children itself."""


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Block SIGINT and SIGTERM in processes that this thread starts meanwhile, from their first moment on.

    They would end an interpreter that is still importing; the mask is inherited. Other threads are not affected.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
