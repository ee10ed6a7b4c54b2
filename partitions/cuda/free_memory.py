"""What is free of a GPU's memory, or in the pool of what is allocated in the order of streams."""

from cuda.bindings import driver

from .driver import CUDAError, handle_return

POOL_HAS = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
LOOKS = 5
"""How often free memory is asked for at most until the pool was the same before and after."""


def free_or_pooled(device: int) -> int | None:
    """Bytes of a device's memory that are free, and those that its memory pool has taken, together.

    None if the driver does not say, or other threads make the pool grow all the time. A context must be current.
    """
    try:
        pool = handle_return(driver.cuDeviceGetMemPool(device))
        has = int(handle_return(driver.cuMemPoolGetAttribute(pool, POOL_HAS)))
        for _ in range(LOOKS):
            free, _total = handle_return(driver.cuMemGetInfo())
            before, has = has, int(handle_return(driver.cuMemPoolGetAttribute(pool, POOL_HAS)))
            if has == before:
                return int(free) + has
    except CUDAError:
        pass
    return None
