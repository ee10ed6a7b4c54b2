"""Hardware: devices divided into granules, and partitions of them. Knows neither models nor tenants."""

import ctypes
import logging
from collections.abc import Iterable

from .base import Device, Partition
from .cpu import open_cpu
from .errors import DeviceLost, DeviceUnavailable, DoesNotFit, Misplaced, PartitionError, Unsupported
from .installing import install_command
from .manager import Move, PartitionManager

__all__ = [
    "Device",
    "DeviceLost",
    "DeviceUnavailable",
    "DoesNotFit",
    "Misplaced",
    "Move",
    "Partition",
    "PartitionError",
    "PartitionManager",
    "Unsupported",
    "has_driver",
    "open_cpu",
    "open_device",
]


log = logging.getLogger("greenlane.partitions")


def open_device(
    kind: str = "auto", cores: Iterable[int] | None = None, index: int = 0, granule_sms: int | None = None
) -> Device:
    """Open a device: `cpu`, `cuda`, or `auto` for a GPU if there is one. The log says which it is, and why.

    `cores` limits a CPU device to these core numbers; by default it has all that the process may use. `index` and
    `granule_sms` are for CUDA: the GPU's ordinal, and the SMs of a granule (by default the fewest that the driver can
    isolate). Raises DeviceUnavailable with what is missing, ValueError for another kind, TypeError for cores that are not
    numbers.
    """
    cores = None if cores is None else _core_numbers(cores)
    if kind == "cpu":
        return open_cpu(cores)
    if kind == "cuda":
        return _open_cuda(index, granule_sms)
    if kind != "auto":
        raise ValueError(f"unknown device kind {kind!r}; expected auto, cpu or cuda")
    try:
        device = _open_cuda(index, granule_sms)
    except DeviceUnavailable as error:
        log.info("the device is the CPU: %s", error)
        return open_cpu(cores)
    log.info("the device is a GPU: %s", device.describe())
    return device


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed, without which no GPU can be opened. Initialises nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _core_numbers(cores: Iterable[int]) -> list[int]:
    """Library callers may pass something else, such as "0-3"."""
    numbers = list(cores) if isinstance(cores, Iterable) else []
    if not isinstance(cores, Iterable) or not all(type(number) is int for number in numbers):
        raise TypeError(f"cores are numbers, such as [0, 1, 2]; got {cores!r}")
    return numbers


def _open_cuda(index: int, granule_sms: int | None) -> Device:
    """The only place where this package imports CUDA."""
    try:
        from .cuda.device import open_cuda
    except ImportError as error:
        raise DeviceUnavailable(
            f"CUDA partitions need {install_command('cuda')} (or cpu,rtx, to serve models on them); "
            f"or use backend = 'cpu' ({error})"
        ) from error
    return open_cuda(index, granule_sms)
