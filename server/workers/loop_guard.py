"""Cancels a work that was expected to be short and keeps the event loop from its other connections."""

import time
from collections.abc import Callable
from threading import Semaphore, Thread

from engines import Work

INTERVAL = 0.02
"""Seconds between two looks: a work is cancelled when it has run for this long, or at the latest for twice as long. Looking so
rarely costs nothing, and a client hardly notices such a pause."""


class LoopGuard:
    """A thread that looks at what runs on the event loop, while anything does.

    Whether a work is short is known from its shapes, but a loop in a model may depend on the numbers in its inputs. `begin` and
    `end` are for the event loop's thread, `close` for any. After an interval without a run the thread rests; it ends after
    `close`. `sleep` blocks for so many seconds.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.thread: Thread | None = None
        self.resting = False
        self._sleep = sleep
        self._work: Work | None = None
        self._runs = 0
        self._closed = False
        self._rest = Semaphore(0)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "resting" if self.resting or self.thread is None else "looking"
        return f"<LoopGuard {state}, {self._runs} runs>"

    def begin(self, work: Work) -> None:
        """This work runs on the event loop from now on."""
        self._work = work
        self._runs += 1
        if self.resting:
            self.resting = False
            self._rest.release()
        elif self.thread is None:
            self.thread = Thread(target=self._look, name="guard of the event loop", daemon=True)
            self.thread.start()

    def end(self) -> None:
        """It has ended."""
        self._work = None

    def close(self) -> None:
        """End the thread, within an interval; nothing begins after this."""
        self._closed = True
        self._rest.release()

    def _look(self) -> None:
        while not self._closed:
            runs = self._runs
            work = self._work
            self._sleep(INTERVAL)
            if work is not None and self._work is work:
                work.cancel()
            elif self._runs == runs:
                self.resting = True
                if self._runs == runs:  # Otherwise `begin` may not have seen that this thread rests.
                    self._rest.acquire()
                self.resting = False
            work = None
