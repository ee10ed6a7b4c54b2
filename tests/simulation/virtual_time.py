"""A clock that jumps to the next timer of the event loop whenever nothing else is to be done, so that hours pass in seconds."""

import asyncio
import contextvars
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

import pytest

YEAR = 365 * 86400.0
_GIVEN = 10.0
"""Seconds, of the machine's clock, that a thread gets for what it does before time goes on without it."""


class VirtualClock:
    """What `time` says while it is installed. `busy` tells whether threads are at work that the loop does not know of."""

    def __init__(self) -> None:
        self.now = 10_000.0
        self.offset = 1_790_000_000.0
        """Seconds since 1970, less `now`."""
        self.busy: Callable[[], bool] = lambda: False
        self.calls = 0
        """Calls of functions in threads that go on now, less those that `sleep`."""
        self._lock = threading.Lock()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have everything that asks `time` for the time ask this clock."""
        patch.setattr(time, "monotonic", lambda: self.now)
        patch.setattr(time, "monotonic_ns", lambda: round(self.now * 1e9))
        patch.setattr(time, "time", lambda: self.now + self.offset)
        patch.setattr(time, "time_ns", lambda: round((self.now + self.offset) * 1e9))

    def count(self, change: int) -> None:
        """A call in a thread begins, or ends."""
        with self._lock:
            self.calls += change

    def sleep(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """In a thread: wait for so long by this clock."""
        ended = threading.Event()
        loop.call_soon_threadsafe(loop.call_later, seconds, ended.set)
        self.count(-1)
        ended.wait()
        self.count(1)


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        found, until, clock = super().select(0), time.perf_counter() + _GIVEN, self._clock
        if timeout is not None and timeout <= 0:
            return found
        while not found and (clock.calls > 0 or clock.busy() or timeout is None) and time.perf_counter() < until:
            found = super().select(0.001)
        if not found and timeout is not None:
            clock.now += timeout + 1e-6
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Selector(clock))
        self._virtual = clock

    def run_in_executor(self, executor: Executor | None, func: Any, *args: Any) -> Any:
        self._virtual.count(1)
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(lambda _: self._virtual.count(-1), context=contextvars.Context())
        return future


def run(clock: VirtualClock, main: Coroutine[Any, Any, None]) -> None:
    """Run this on an event loop whose time is this clock's."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=lambda: _Loop(clock)) as runner:
        clock.install(patch)
        runner.run(main)
