"""What other processes make for all models at once when a server with a GPU starts: plans, kernels, answers to compare with.

Nobody is served yet, so builds and compilations of all models may use the cores and the memory that are there. Each tenant's
models are still loaded one by one, in the order in which all is made for them: so the chain of a tenant waits for what other
processes do for its slowest model alone. A model that ends a process by being built is named by that process; nothing of it is
in this one before it is loaded.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engines import Builds, CacheFolder, RuntimeSettings, make_ahead, makes_ahead
from engines.thread_priority import lower_priority
from partitions import Device, Partition, PartitionError
from partitions.health import memory_left

from ..config.schema import ModelsConfig

if TYPE_CHECKING:
    from .model_loader import ModelLoader

log = logging.getLogger("greenlane.runtime")

MOST = 16
"""Children whose contexts take turns on one GPU, at most."""
CHILD = 3 << 30
"""Bytes of the host's memory for a child that compiles, beside its model: CUDA, TensorRT, and its compiling threads. The log
says of each child what it took: 2.7 GiB with MobileNetV2, and 0.6 to 1.2 with seven others (H100, 12 cores, 2026-11-26).
"""
CONTEXT = 1 << 30
"""Bytes of the GPU's memory for such a child, beside its model. A context alone takes 0.5 GiB."""
COPIES = 3
"""How often a child has the model's file in memory at most: the file, what the library makes of it, and the plan."""

Key = tuple[str, str]
"""A tenant and a model."""


class Making(NamedTuple):
    """How models are made ahead, for a partition; how many at once, if this is the size of the largest file; and the block in
    which what has failed is not tried again.
    """

    make: Callable[[Path, int | None, RuntimeSettings, Partition], object]
    at_once: Callable[[int], int]
    once: Callable[[], AbstractContextManager[None]]


class Wanted(NamedTuple):
    """A model that a tenant is to be served: the configuration in place of its own, its partition, and the largest file for
    which there is room in the tenant's budget, None for any.
    """

    override: str | None
    partition: Partition
    most: int | None


class Ahead:
    """What is being made, by tenant and model. Belongs to the event loop."""

    def __init__(self, made: Mapping[Key, "asyncio.Future[object]"]) -> None:
        self._made = dict(made)

    def first(self, tenant: str, left: Mapping[str, Collection[str]]) -> str | None:
        """The first of these models, which are given with their steps, that is made and has no step among the others; None
        while there is none. Steps that are ensembles themselves do not count, as they are refused.
        """
        for name, steps in left.items():
            made = self._made.get((tenant, name))
            if (made is None or made.done()) and not any(step in left and not left[step] for step in steps):
                return name
        return None

    async def wait(self, tenant: str, left: Mapping[str, Collection[str]]) -> None:
        """Wait until one more of these models is made."""
        made = (self._made.get((tenant, name)) for name in left)
        await asyncio.wait([each for each in made if each and not each.done()], return_when=asyncio.FIRST_COMPLETED)

    def forget(self, tenant: str, name: str) -> None:
        """This model was loaded: what was kept for that is freed."""
        self._made.pop((tenant, name), None)


NOTHING_AHEAD = Ahead({})


@asynccontextmanager
async def making_ahead(model_loader: "ModelLoader", wanted: Mapping[Key, Wanted]) -> AsyncIterator[Ahead]:
    """Have these models made, each once for all tenants, the largest file first, until the block ends."""
    making, loop = model_loader.making, asyncio.get_running_loop()
    if making is None or not wanted:
        yield NOTHING_AHEAD
        return
    sizes = await asyncio.to_thread(_sizes, model_loader, wanted)
    fitting = [key for key, (_, _, most) in wanted.items() if most is None or sizes[key] <= most]
    fitting.sort(key=lambda key: -sizes[key])
    try:
        threads = await asyncio.to_thread(making.at_once, max(map(sizes.__getitem__, fitting), default=0))
    except (OSError, PartitionError) as error:
        log.warning("models are made one after the other, as it is not known how much memory is left: %s", error)
        threads = 1
    made: dict[tuple[str, str | None], asyncio.Future[object]] = {}
    pool = ThreadPoolExecutor(threads, "ahead", lower_priority)
    with making.once():
        for tenant, name in fitting:
            override, partition, _ = wanted[tenant, name]
            if (name, override) not in made:
                made[name, override] = loop.run_in_executor(pool, model_loader.make_ahead, name, override, partition)
        try:
            yield Ahead({(tenant, name): made[name, wanted[tenant, name].override] for tenant, name in fitting})
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def making_of(device: Device, builds: Builds, part: float = 1.0, left: Callable[[], int] = memory_left) -> Making | None:
    """How models for a device are made; None where a model is loaded without anything that could be made before.

    `part` is this process's of what is there, as others start at the same time. `left` returns how much memory the host has.
    """
    if not makes_ahead(device):
        return None

    def count(largest: int) -> int:
        """Raises OSError, PartitionError."""
        return at_once(int(part * builds.cores()), int(part * left()), int(part * (device.memory() or 0) / 2), largest)

    return Making(
        lambda path, max_batch, settings, partition: make_ahead(path, device, settings, max_batch, builds, partition),
        count,
        builds.once,
    )


def at_once(cores: int, memory: int, device_memory: int, largest: int) -> int:
    """How many models may be worked on at once with so many cores, bytes that are left of the host's memory, and bytes of the
    GPU's. `largest` is the size of the largest model's file.
    """
    return max(1, min(MOST, cores, memory // (CHILD + COPIES * largest), device_memory // (CONTEXT + COPIES * largest)))


def _sizes(model_loader: "ModelLoader", wanted: Mapping[Key, Wanted]) -> dict[Key, int]:
    found = {}
    for key in wanted:
        try:
            found[key] = model_loader.file_bytes(key[1], wanted[key].override)
        except OSError:  # It will be reported when the model is loaded.
            found[key] = 0
    return found


CACHE_DIRECTORY = ".greenlane"
"""The default directory, in the repository; no model's name begins with a dot."""


def open_builds(models: ModelsConfig, is_idle: Callable[[], bool] = lambda: True) -> Builds:
    """The builder for this configuration; directories are created only when something is stored.

    Without `models.cache` that is a directory in the repository, or, where the repository cannot be written, in the user's
    own directory for caches: $XDG_CACHE_HOME, or else ~/.cache. `is_idle` is as in `Builds`.
    """
    own = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "greenlane")
    candidates = [models.cache] if models.cache else [models.repository / CACHE_DIRECTORY, own]
    return Builds(CacheFolder(candidates), models.build_timeout, compiles=True, is_idle=is_idle)
