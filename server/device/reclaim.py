"""Frees engines of unloaded models, and memory that executors have not used for a while."""

import asyncio
import logging
from collections.abc import Mapping

from engines import EngineError
from partitions import PartitionError

from ..workers.worker import Worker
from .model_loader import ModelLoader
from .taken_memory import bound_executors
from .tenant_locks import TenantLocks

log = logging.getLogger("greenlane.models")

KEPT = 5.0
"""Seconds for which the host memory of a large inference is kept for the next one."""
CHECK_INTERVAL = 1.0
"""Seconds between two checks for engines that can be freed."""


async def free_engines(model_loader: ModelLoader, workers: Mapping[str, Worker], locks: TenantLocks) -> None:
    """Free unused engines, one at a time, when no inference was queued or ran at two checks in a row.

    Runs on the event loop until it is cancelled.
    """
    before = False
    while True:
        await asyncio.sleep(CHECK_INTERVAL)
        quiet = all(worker.idle for worker in workers.values())
        await asyncio.to_thread(_release_unused, model_loader, workers, quiet and before)
        before = quiet
        await _trim(workers, locks)


async def _trim(workers: Mapping[str, Worker], locks: TenantLocks) -> None:
    """Have all executors free memory that they have not used for a while, except of tenants whose models are changing.

    A tenant may come or go meanwhile. Failures are logged: the memory of the others is freed all the same.
    """
    for name in list(workers):
        if locks.held(name):
            continue
        async with locks.both(name):
            if worker := workers.get(name):
                try:
                    await asyncio.to_thread(worker.trim, KEPT)
                except (EngineError, PartitionError) as error:
                    log.warning("unused memory of %s was not freed: %s", name, error)


def _release_unused(model_loader: ModelLoader, workers: Mapping[str, Worker], quiet: bool) -> None:
    """Blocks."""
    model_loader.release_unused(bound_executors(workers), quiet)
