"""Whose memory an address is, asked of the driver when the address is used: what was pinned a moment ago may be no more."""

from cuda.bindings import driver
from cuda.core._utils.cuda_utils import handle_return

from .errors import ExecutionFailed

_MEMORY_TYPE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_ORDINAL = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_ON_A_DEVICE = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
_SUCCESS = driver.CUresult.CUDA_SUCCESS


def is_reachable(address: int, device: int) -> bool:
    """Whether the GPU with this ordinal can use this address: pinned host memory, or its own.

    Raises ExecutionFailed for the memory of another GPU, which no staging brings here.
    """
    result, kind = driver.cuPointerGetAttribute(_MEMORY_TYPE, address)
    if result != _SUCCESS:
        return False
    if kind == _ON_A_DEVICE and (owner := int(handle_return(driver.cuPointerGetAttribute(_ORDINAL, address)))) != device:
        raise ExecutionFailed(
            f"the memory at {address:#x} is device {owner}'s, but the engine is bound to device {device}; copy it there first"
        )
    return True
