"""Places for messages that arrive, handed out in turn to the connections that wait for one."""

import asyncio
from collections import deque
from typing import Any


class Places:
    """So many places. Belongs to the event loop.

    A connection with hundreds of calls waits behind itself: each connection that waits gets a place in its turn.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The calls that wait, by connection; the one whose turn it is first."""

    def __repr__(self) -> str:
        return f"<Places {self._free} free, {len(self._waiting)} connections wait>"

    @property
    def full(self) -> bool:
        """Whether the next call has to wait."""
        return not self._free

    @property
    def wanted(self) -> bool:
        """Whether calls wait."""
        return bool(self._waiting)

    async def take(self, context: Any) -> None:
        """Wait for a place for this call; it is to be given back by `give`."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(context.peer(), deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give()
            raise

    def give(self) -> None:
        """Give a place back, or to the next call that waits."""
        while self._waiting:
            peer = next(iter(self._waiting))
            calls = self._waiting.pop(peer)
            turn = calls.popleft()
            if calls:
                self._waiting[peer] = calls
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
