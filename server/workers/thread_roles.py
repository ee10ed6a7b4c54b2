"""Which of a worker's threads does what: one waits for the oldest work while another listens for tickets.

Leader and followers without a handover: each thread that has nothing else to do is blocked in `Tickets.listen`, and the
kernel tells one of them what came. That one enqueues it, then waits for works unless the other thread does. So no inference
waits until one thread has woken another.

Where a work ends as soon as another thread would be awake, a second thread that hears of tickets costs more than it gives.
While works are that short one of the two is parked, and the other looks for tickets between two waits.
"""

from collections.abc import Callable
from threading import Lock, Semaphore


class ThreadRoles:
    """What the threads of a worker, one or two, do now. Any of them calls any method, unless it says otherwise.

    The second of two is parked from the start. `wake` makes one thread that listens go on. `stopped` is whether all should end
    once nothing is in flight. `alone` is whether the thread that waits for works has to look for tickets itself, as no other
    listens. `long` is whether it waits for a long one, or did so last.
    """

    def __init__(self, threads: int, wake: Callable[[], None]) -> None:
        self.stopped = self.long = False
        self.alone = True
        self._wake = wake
        self._changing = Lock()
        self._parking = Semaphore(0)
        self._threads = threads
        self._parked = threads > 1
        self._waiting = Lock()

    def __repr__(self) -> str:
        state = "stopped" if self.stopped else "one waits" if self._waiting.locked() else "none waits"
        return f"<ThreadRoles of {self._threads} threads, {state}{', one is parked' if self._parked else ''}>"

    def enter(self) -> None:
        """For the second thread, before anything else: blocks while it is parked."""
        self._parking.acquire()

    def listens(self) -> bool:
        """Whether the calling thread should listen, which has nothing else to do; it should end if not. Blocks while parked."""
        if not self.long and not self.alone:
            self._park()
        return not self.stopped

    def waits(self) -> bool:
        """Whether the calling thread should wait for works, until it calls `done`; another thread does if not."""
        return self._waiting.acquire(blocking=False)

    def done(self) -> None:
        """The calling thread waits no more. It has to look again whether anything was enqueued meanwhile."""
        self._waiting.release()

    def expect(self, long: bool) -> None:
        """The next work takes long, or it does not. For the thread that waits for works, before it blocks."""
        if long == self.long:
            return
        with self._changing:
            self.long = long
            if long:
                self._unpark()

    def stop(self) -> None:
        """Have every thread end once nothing is in flight. Any thread."""
        with self._changing:
            self.stopped = True
            self._unpark()
        self._wake()

    def end(self) -> bool:
        """The calling thread ends; whether it was the last."""
        with self._changing:
            self._threads -= 1
            self._unpark()
            self.alone = True
            last = not self._threads
        if not last:
            self._wake()  # Another may be listening still.
        return last

    def _park(self) -> None:
        with self._changing:
            if self.long or self.alone or self.stopped:
                return
            self._parked = self.alone = True
        self._parking.acquire()

    def _unpark(self) -> None:
        """With the lock."""
        if self._parked:
            self._parked = self.alone = False
            self._parking.release()
