"""Things said on any thread, heard on one event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Calls `hear` on the event loop for each item put, in order; wakes the loop once for all that arrive meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hear: Callable[[T], None]) -> None:
        self._loop = loop
        self._hear = hear
        self._items: deque[T] = deque()
        self._rung = False

    def __repr__(self) -> str:
        return f"<Mailbox {len(self._items)} unheard>"

    def put(self, item: T) -> None:
        """Say something; returns at once. What is said to a loop that has closed is lost."""
        self._items.append(item)
        if not self._rung:
            self._rung = True
            with suppress(RuntimeError):  # The loop may close at any moment, and its thread with it.
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._rung = False  # Before the items are read: whoever adds one later than this rings again.
        while self._items:
            self._hear(self._items.popleft())
