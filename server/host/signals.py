"""Signals while children are started, while this process starts, and when its terminal closes."""

import os
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


def exit_on_interrupt() -> None:
    """End by SIGINT at once, as programs without a handler do, instead of with a traceback of what is imported then.

    SIGINT stays ignored where it is, as in background jobs of a shell. `raise_keyboard_interrupt` undoes this.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_keyboard_interrupt() -> None:
    """Raise KeyboardInterrupt for SIGINT again."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Terminal:
    """The terminal from which this process was started, if it was.

    SIGHUP comes when a terminal closes, and by convention also to have a service read its configuration again.
    """

    def __init__(self) -> None:
        self._had = _has_terminal()

    @property
    def closed(self) -> bool:
        """Whether there was a terminal, and is none any more."""
        return self._had and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
