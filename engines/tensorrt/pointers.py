"""Whose memory an address is, asked of the driver when the address is used: what was pinned a moment ago may be no more."""

from cuda.bindings import driver

from ..errors import ExecutionFailed

_ATTRIBUTES = (
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
)
_NOT_CUDAS = 0
_ON_A_DEVICE = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
_SUCCESS = driver.CUresult.CUDA_SUCCESS


def is_reachable(address: int, device: int) -> bool:
    """Whether the GPU with this ordinal can use this address: pinned host memory, or its own.

    Raises ExecutionFailed for the memory of another GPU, which no staging brings here.
    """
    # Not cuPointerGetAttribute, to which memory that is not CUDA's is an error, of which compute-sanitizer makes a finding.
    result, found = driver.cuPointerGetAttributes(len(_ATTRIBUTES), _ATTRIBUTES, address)
    if result != _SUCCESS or found[0] == _NOT_CUDAS:
        return False
    kind, owner = found
    if kind == _ON_A_DEVICE and owner != device:
        raise ExecutionFailed(
            f"the memory at {address:#x} is device {owner}'s, but the engine is bound to device {device}; copy it there first"
        )
    return True
