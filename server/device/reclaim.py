"""Frees engines of models that were unloaded, and memory of executors that was not needed lately."""

import asyncio
from collections.abc import Mapping

from ..workers.worker import Worker
from .model_loader import ModelLoader

KEPT = 5.0
"""Seconds after a large inference for which what it took of the process's memory is kept for the next."""
LOOK = 1.0
"""Seconds between two looks for engines that can be freed."""


async def free_engines(model_loader: ModelLoader, workers: Mapping[str, Worker], changing: Mapping[str, asyncio.Lock]) -> None:
    """Free what was unloaded, an engine at a time, when no inference has run or waited for two looks in a row.

    Runs on the event loop until it is cancelled. `changing` are the locks of those who change a tenant's models.
    """
    before = False
    while True:
        await asyncio.sleep(LOOK)
        quiet = all(worker.idle for worker in workers.values())
        await asyncio.to_thread(_release_unused, model_loader, workers, quiet and before)
        before = quiet
        await _trim(workers, changing)


async def _trim(workers: Mapping[str, Worker], changing: Mapping[str, asyncio.Lock]) -> None:
    """Have every tenant's executors give back memory that was not needed lately, but for those that are being changed."""
    for name, lock in changing.items():
        if not lock.locked():
            async with lock:
                if worker := workers.get(name):
                    await asyncio.to_thread(worker.trim, KEPT)


def _release_unused(model_loader: ModelLoader, workers: Mapping[str, Worker], quiet: bool) -> None:
    """Blocks."""
    executors = [executor for worker in list(workers.values()) for executor in list(worker.executors.values())]
    model_loader.release_unused(executors, quiet)
