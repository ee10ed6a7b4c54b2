"""Waits for tickets on an eventfd that another process shares, and may fill, empty or set to block at any moment.

So this process never writes to it, and reads it only in a way that does not wait, whatever its flags are: these belong to both
processes, and change between a look and the call after it. A reader waits for that eventfd and for a second one, by which its
own process wakes it and which no other process has.
"""

import ctypes
import errno
import os
import select
import weakref
from ctypes import c_int, c_int64, c_size_t, c_uint64, c_void_p

_NOWAIT = getattr(os, "RWF_NOWAIT", 8)
_CURRENT = -1
"""In place of an offset: an eventfd has none."""


class _Part(ctypes.Structure):
    """An iovec."""

    _fields_ = (("base", c_void_p), ("length", c_size_t))


_libc = ctypes.PyDLL(None, use_errno=True)  # Keeps the GIL, for which the reader has just waited; the call takes a microsecond.
_libc.preadv2.argtypes = (c_int, c_void_p, c_int, c_int64, c_int)


def _read(event: int, count: c_uint64) -> int:
    """Take the count of an eventfd without waiting; 0, or why it could not be read."""
    part = _Part(ctypes.addressof(count), 8)
    return 0 if _libc.preadv2(event, ctypes.addressof(part), 1, _CURRENT, _NOWAIT) == 8 else ctypes.get_errno()


def take(event: int) -> int:
    """The count of an eventfd, which is 0 afterwards.

    Does not wait, except where the kernel knows no such read, as Linux before 5.8, and another reader is faster.
    """
    count = c_uint64()
    failed = _read(event, count)
    if failed not in (0, errno.EAGAIN) and _is_readable(event):
        return os.eventfd_read(event)
    return 0 if failed else count.value


def _is_readable(event: int) -> bool:
    poller = select.poll()
    poller.register(event, select.POLLIN)
    return bool(poller.poll(0))


class Listener:
    """The reading end of `event`, for any number of threads of this process. It has two descriptors, closed with it."""

    def __init__(self, event: int) -> None:
        self._event = event
        self.wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Becomes readable by `wake`. Of this process alone."""
        weakref.finalize(self, os.close, self.wakes)
        self._both = select.epoll()  # Edges, so that the kernel wakes one of several threads.
        for descriptor in (event, self.wakes):
            self._both.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def listen(self, seconds: float | None = None) -> int:
        """Block until the other process has counted, `wake` is called, or so many seconds have passed; return that count, or 0.

        One of several listening threads returns. A `wake` without a listener makes the next call return.
        """
        while True:
            found = self._both.poll(seconds)
            count, woken = self.take(), self._take_wake()
            if count or woken or not (found or seconds is None):
                return count

    def take(self) -> int:
        """The count so far, as the function `take`."""
        return take(self._event)

    def wake(self) -> None:
        """Make one call of `listen` return. Does not wait. Any thread."""
        os.eventfd_write(self.wakes, 1)

    def _take_wake(self) -> bool:
        try:
            return os.eventfd_read(self.wakes) > 0
        except BlockingIOError:
            return False
