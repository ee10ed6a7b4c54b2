"""The connections to one tenant's gRPC port: which have shown a call of the tenant's, and which are closed.

gRPC accepts them itself, and says of none that it is open before a call comes. So the sockets of this process are looked at.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from ..errors import RequestError
from . import sockets

log = logging.getLogger("greenlane")

MOST_UNSHOWN = 256
"""Open connections that have shown no call of the tenant's; where there are more, the oldest are closed."""
MOST_UNSHOWN_BYTES = 8 << 20
"""Bytes that such a connection may send: more than a call with a message, as far as that is let in before it is asked for."""
LOOK_INTERVAL = 1.0
"""Seconds between two looks."""


class Connections:
    """Belongs to the event loop. `refuse` returns the error for a connection beyond the number that it is called with."""

    def __init__(self, port: int, refuse: Callable[[int], RequestError]) -> None:
        self._port = port
        self._refuse = refuse
        self._shown: set[str] = set()
        self._open: dict[str, None] = {}
        """Those of the last look that have shown nothing, oldest first."""
        self._cut: set[str] = set()
        self._looking: asyncio.Task[None] | None = None

    @property
    def unshown(self) -> int:
        """How many have shown no call of the tenant's, as of the last look."""
        return len(self._open)

    def start(self) -> None:
        """Begin to look."""
        self._looking = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Look no more."""
        if self._looking:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking

    def show(self, peer: str, most: int | None) -> None:
        """A call of the tenant's has come from this peer, of whose connections `most` may be open.

        Raises what `refuse` returns.
        """
        if peer in self._shown:
            return
        if most is not None and len(self._shown) >= most:
            self._shown &= sockets.connections(self._port).keys()
            if len(self._shown) >= most:
                raise self._refuse(most)
        self._shown.add(peer)
        self._open.pop(peer, None)

    def cut(self, peer: str) -> None:
        """Close a connection at once, with all its calls and what it has sent that was not read."""
        if peer not in self._cut:
            self._cut.add(peer)
            sockets.reset(self._port, [peer])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            try:
                found = await asyncio.to_thread(sockets.connections, self._port)
                self._close_surplus(found)
            except OSError as error:
                log.warning("the connections of gRPC's port %d cannot be looked at: %s", self._port, error)

    def _close_surplus(self, found: dict[str, int]) -> None:
        """Given the bytes that each connection has sent, close those that show no call and are too many, or send too much."""
        self._shown &= found.keys()
        self._cut &= found.keys()
        known = [peer for peer in self._open if peer in found and peer not in self._shown]
        self._open = dict.fromkeys(known) | dict.fromkeys(peer for peer in found if peer not in self._shown)
        ended = [peer for peer in self._open if found[peer] > MOST_UNSHOWN_BYTES]
        ended += list(self._open)[: max(0, len(self._open) - MOST_UNSHOWN)]
        if ended:
            sockets.reset(self._port, ended)
            text = "%d connections to gRPC's port %d were closed that have shown no call of the tenant's"
            log.warning(text, len(ended), self._port)
