"""Shared by both ways to start a server: the routers of the process that owns the device, and garbage collection."""

import gc

from ..device.runtime import Runtime
from . import docs, metrics, partitions

ROUTERS = (partitions.router, metrics.router, docs.router)
"""Administration and metrics."""

EXIT_DELAY = 0.2
"""Seconds between the last response and the exit after a lost device, so that the response reaches its client."""


async def freeze(runtime: Runtime) -> None:
    """Exclude from garbage collection what is there once all models were tried: a full collection would stop all for 35 ms."""
    await runtime.loaded()
    gc.collect()
    gc.freeze()
