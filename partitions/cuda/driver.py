"""The driver's errors and their translation: which call failed, and whether the device is lost.

The only use of cuda.core's private names.
"""

from collections.abc import Iterator
from contextlib import contextmanager

# cuda.core raises CUDAError but exports neither name. No other module of this repository imports private names of cuda.core.
from cuda.core._utils.cuda_utils import CUDAError as CUDAError
from cuda.core._utils.cuda_utils import handle_return as handle_return

from ..errors import DeviceLost, PartitionError

# Errors after which the process's context is unusable: "the process must be terminated and relaunched"
# (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html, CUresult).
LOST = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT",
        "CONTAINED",
        "CONTEXT_IS_DESTROYED",
        "DEINITIALIZED",
        "DEVICE_UNAVAILABLE",
        "ECC_UNCORRECTABLE",
        "EXTERNAL_DEVICE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
        "MPS_CLIENT_TERMINATED",
        "MPS_RPC_FAILURE",  # The MPS server, which had the context, is gone.
        "NVLINK_UNCORRECTABLE",
        "TENSOR_MEMORY_LEAK",
        "UNKNOWN",
    )
)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise a CUDA error of the block as `what: text`, as DeviceLost if the device is unusable, else as PartitionError."""
    try:
        yield
    except CUDAError as error:
        raise translation(error, what) from error


def translation(error: CUDAError, what: str) -> PartitionError:
    """The error to raise for a CUDA error.

    An error of earlier work on the device may surface in any later call, so `what` need not be its cause.
    """
    code = str(error).partition(":")[0]
    return (DeviceLost if code in LOST else PartitionError)(f"{what}: {error}")
