"""What is measured of a GPU's memory: how much this process has of it, or how much is free of all of it.

Apart from `driver_memory`, which is imported where CUDA is not installed, too.
"""

import logging
import os
from collections.abc import Callable
from functools import partial

from cuda.bindings import driver

from .driver import CUDAError, handle_return
from .nvml import Nvml

log = logging.getLogger("greenlane.partitions")

Bytes = Callable[[], int | None]

PROOF = 4 << 20
"""Bytes: two of the driver's steps, so it takes them from nothing that it has already."""
POOL_HAS = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
LOOKS = 5
"""How often it is looked at most until the pool was the same before and after."""


def find_own(nvml: Nvml | None) -> Bytes | None:
    """What says how much this process has, which an allocation has proven; None if nothing does. A context must be current.

    NVML says it by the process's number. In a container with numbers of its own some drivers list other numbers, or 0 bytes
    (560.35: https://github.com/NVIDIA/open-gpu-kernel-modules/pull/614).
    """
    if nvml is None:
        return None
    process = os.getpid()
    ask = partial(nvml.memory, process)
    if (before := ask()) is None:
        log.info("NVML lists no memory of this process (%d)", process)
        return None
    try:
        address = handle_return(driver.cuMemAlloc(PROOF))
        after = ask()
        handle_return(driver.cuMemFree(address))
    except CUDAError as error:
        log.info("allocating %d bytes to see whether NVML counts them: %s", PROOF, error)
        return None
    if after is None or after - before < PROOF:
        log.info("NVML lists %d bytes of this process (%d), and %s after it allocated %d", before, process, after, PROOF)
        return None
    return ask


def level(device: int, own: Bytes | None) -> int | None:
    """Bytes that fall by what the driver takes, and do not change by what its memory pool takes.

    By `own`, if it is given, also not by what other processes take. None if nothing says it, or other threads make the pool
    grow all the time. A context must be current.
    """
    try:
        pool = handle_return(driver.cuDeviceGetMemPool(device))
        has = int(handle_return(driver.cuMemPoolGetAttribute(pool, POOL_HAS)))
        for _ in range(LOOKS):
            if (free := _free(own)) is None:
                return None
            before, has = has, int(handle_return(driver.cuMemPoolGetAttribute(pool, POOL_HAS)))
            if has == before:
                return free + has
    except CUDAError:
        pass
    return None


def _free(own: Bytes | None) -> int | None:
    if own is None:
        free, _total = handle_return(driver.cuMemGetInfo())
        return int(free)
    return None if (used := own()) is None else -used
