"""Refuses new requests, and waits for the answers to all that were accepted, but not for ever."""

import asyncio
import logging
from collections.abc import Collection

from ..tenants.frontend import ManagedFrontend
from .device_runtime import DeviceRuntime
from .together import together

log = logging.getLogger("greenlane.control")

_LAST_WAIT = 1.0
"""Seconds at most for inferences to end that were cancelled."""


async def refuse_and_drain(frontends: Collection[ManagedFrontend], reason: str) -> None:
    """Refuse new requests for this reason, and return when the last one is answered."""
    for frontend in frontends:
        frontend.refuse(reason)
    await together(frontend.drained() for frontend in frontends)


async def drain(frontends: Collection[ManagedFrontend], runtimes: Collection[DeviceRuntime], limit: float) -> bool:
    """The same as the server drains. Inferences that have not ended after `limit` seconds are cancelled, and waited for once
    more as long, at most a second. Returns whether every request was answered by its inference, or by its cancellation.
    """
    draining = asyncio.ensure_future(refuse_and_drain(frontends, "the server is draining"))
    if not (await asyncio.wait({draining}, timeout=limit))[0]:
        text = f"the server is draining, and this had not ended after {limit:g} s (server.drain_timeout)"
        log.error("drain: cancelling inferences that have not ended after %g s, and those queued behind them", limit)
        for runtime in runtimes:
            runtime.abandon(text)
        if not (await asyncio.wait({draining}, timeout=min(limit, _LAST_WAIT)))[0]:
            log.error("drain: some inferences cannot be cancelled; their requests are answered 503")
            for frontend in frontends:
                frontend.suspend(text)
            return False
    draining.result()
    return True
