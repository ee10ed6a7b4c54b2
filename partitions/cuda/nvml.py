"""NVML, the driver's library for managing GPUs: the energy that a GPU has taken, and the memory of it that a process has."""

import ctypes
import logging

log = logging.getLogger("greenlane.partitions")

_MOST_PROCESSES = 1024
"""The driver lists 950 (NV2080_CTRL_GPU_GET_PIDS_MAX_COUNT in NVIDIA's open kernel modules)."""
_NOT_AVAILABLE = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE, of memory that the driver does not manage, as on Windows."""


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = (
        ("process", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """NVML of one GPU, of a driver that has green contexts. Any thread may call; nothing raises."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def energy(self) -> int | None:
        """Microjoules that the GPU has taken, which only grow: from Volta on."""
        millijoules = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value * 1000

    def memory(self, process: int) -> int | None:
        """Bytes of the GPU that a process with this number has, as NVML numbers them; None if it lists none, or does not say.

        Blocks for some 0.1 ms (H200, driver 580.159, 2026-11-27) and takes locks of the driver's, so ask rarely.
        """
        count, listed = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        failed = self._library.nvmlDeviceGetComputeRunningProcesses_v3(self._handle, ctypes.byref(count), listed)
        used = [each.used for each in listed[: count.value] if each.process == process]
        return None if failed or not used or _NOT_AVAILABLE in used else sum(used)


def open_nvml(bus: str) -> Nvml | None:
    """NVML of the GPU at this PCI address; None where it cannot be asked, and why is in the log. Takes 15 to 125 ms."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        log.info("GPU %s: NVML cannot be asked: %s", bus, error)
        return None
    handle = ctypes.c_void_p()
    if failed := library.nvmlInit_v2() or library.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(handle)):
        log.info("GPU %s: NVML cannot be asked: it answers %d", bus, failed)
        return None
    return Nvml(library, handle)
