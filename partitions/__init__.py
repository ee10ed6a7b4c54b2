"""What hardware: devices divided into granules, and partitions of them. Knows no models and no tenants."""

from collections.abc import Iterable

from .base import Device, Partition
from .cpu import open_cpu
from .errors import DeviceUnavailable, DoesNotFit, Misplaced, PartitionError
from .manager import Move, PartitionManager

__all__ = [
    "Device",
    "DeviceUnavailable",
    "DoesNotFit",
    "Misplaced",
    "Move",
    "Partition",
    "PartitionError",
    "PartitionManager",
    "open_cpu",
    "open_device",
]


def open_device(kind: str = "auto", cores: Iterable[int] | None = None) -> Device:
    """Open a device: `cpu`, or `auto` for the best one present. Raises DeviceUnavailable with what is missing.

    `cores` limits a CPU device to these core numbers; by default all that the process may use are taken.
    """
    if kind in ("auto", "cpu"):
        return open_cpu(cores)
    if kind == "cuda":
        raise DeviceUnavailable("this version has no CUDA partitions yet; use backend = 'cpu'")
    raise ValueError(f"unknown device kind {kind!r}; expected auto, cpu or cuda")
