"""Which of a worker's two threads does what: one waits for the oldest work while the other listens for tickets.

Leader/followers without a handover: each idle thread is blocked in `Tickets.listen`, and the kernel wakes one of them when
tickets arrive. That thread enqueues them, then waits for works unless the other thread does. So no inference has to wait until
one thread has woken the other.

If works end sooner than a thread can be woken, the second thread costs more than it gains. While works are that short one of
the two is parked, and the other polls for tickets between two waits.
"""

from collections.abc import Callable
from threading import Lock, Semaphore


class ThreadRoles:
    """What the one or two threads of a worker do. Their threads call the methods, unless a method says otherwise.

    The second of two threads is parked at first. `wake` makes one listening thread return. `stopped`: the threads should end
    once nothing is in flight. `alone`: the thread that waits for works has to poll for tickets, as no other thread listens.
    `long`: the current or last work is a long one.
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
        """Called first by the second thread: blocks while it is parked."""
        self._parking.acquire()

    def listens(self, timed: bool = False) -> bool:
        """Called by an idle thread: whether it should listen for tickets, or end. Blocks while the thread is parked, which is
        not if it is `timed`: the other one may listen for longer.
        """
        if not self.long and not self.alone and not timed:
            self._park()
        return not self.stopped

    def waits(self) -> bool:
        """Whether the calling thread should wait for works until it calls `done`; False if the other thread does."""
        return self._waiting.acquire(blocking=False)

    def done(self) -> None:
        """The calling thread has stopped waiting for works. It must check again whether anything was enqueued meanwhile."""
        self._waiting.release()

    def expect(self, long: bool) -> None:
        """Set whether the next work is a long one. For the thread that waits for works, before it blocks."""
        if long == self.long:
            return
        with self._changing:
            self.long = long
            if long:
                self._unpark()

    def stop(self) -> None:
        """Make all threads end once nothing is in flight. Any thread."""
        with self._changing:
            self.stopped = True
            self._unpark()
        self._wake()

    def end(self) -> bool:
        """The calling thread ends; returns whether it was the last."""
        with self._changing:
            self._threads -= 1
            self._unpark()
            self.alone = True
            last = not self._threads
        if not last:
            self._wake()  # The other may still be listening.
        return last

    def _park(self) -> None:
        with self._changing:
            if self.long or self.alone or self.stopped:
                return
            self._parked = self.alone = True
        self._parking.acquire()

    def _unpark(self) -> None:
        """Call with `_changing` held."""
        if self._parked:
            self._parked = self.alone = False
            self._parking.release()
