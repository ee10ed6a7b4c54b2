"""Shared by both ways to start a server: routers of administration, the end of a server, and garbage collection."""

import asyncio
import gc
from collections.abc import Callable
from threading import Timer

from ..control.controller import Controller
from ..host.leaving import NEEDS_RESTART, end_in_time
from . import docs, settings

ROUTERS = (*docs.ROUTERS, docs.router, settings.log_router)
"""Administration and metrics."""

_EXIT_DELAY = 0.2
"""Seconds between the last response and the exit after a lost device, so that the response reaches its client."""


class ServerEnd:
    """How a server ends: by a drain, or because the device is lost. Belongs to the event loop.

    `kill` ends the process with an exit status, from any thread. It is called if the drain and what follows take too long.
    """

    def __init__(self, controller: Controller, kill: Callable[[int], object]) -> None:
        self._controller = controller
        self._kill = kill
        self._timer: Timer | None = None
        self._freezing: asyncio.Task[None] | None = None

    def freeze_when_loaded(self) -> None:
        """Have what is there once all models were tried left out of garbage collection."""
        self._freezing = asyncio.create_task(_freeze(self._controller))

    async def drain(self) -> None:
        """Refuse new requests, and wait until those that were accepted are answered or `drain_timeout` has passed."""
        server = self._controller.config.server
        self._timer = end_in_time(server.drain_grace, server.drain_timeout, lambda: self._kill(0))
        await self._controller.drain(server.drain_grace)

    async def device_lost(self) -> int:
        """Wait until the device is lost and clients have their responses. Returns the exit status."""
        await self._controller.device_gone.wait()
        await asyncio.sleep(_EXIT_DELAY)
        return NEEDS_RESTART

    def close(self) -> None:
        """No longer freeze objects. The timer of a drain goes on, as the interpreter may hang while it exits."""
        if self._freezing:
            self._freezing.cancel()

    def cancel_timer(self) -> None:
        """The process goes on after the drain."""
        if self._timer:
            self._timer.cancel()


async def _freeze(controller: Controller) -> None:
    """Exclude from garbage collection what is there once all models were tried: a full collection would stop all for 35 ms."""
    await controller.loaded()
    gc.collect()
    gc.freeze()
