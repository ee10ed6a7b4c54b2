"""What both ways to start share: the routers of the process that owns the device, and the garbage collector after loading."""

import gc

from ..device.runtime import Runtime
from . import metrics, models, partitions

ROUTERS = (models.router, partitions.router, metrics.router)
"""What the process that owns the device answers."""

PARTING = 0.2
"""Seconds between the last answer and the exit after a lost device, for it to reach its client."""


async def freeze(runtime: Runtime) -> None:
    """Once everything is loaded, keep the garbage collector off it: a full collection would stop every tenant for 35 ms."""
    await runtime.loaded()
    gc.collect()
    gc.freeze()
