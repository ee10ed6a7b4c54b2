"""NVML, the driver's library for managing GPUs: the energy that a GPU has taken, the memory of it that a process has, and the
bytes that it has moved.
"""

import ctypes
import logging
import math
import time
from collections.abc import Callable

log = logging.getLogger("greenlane.partitions")

_MOST_PROCESSES = 1024
"""The driver lists 950 (NV2080_CTRL_GPU_GET_PIDS_MAX_COUNT in NVIDIA's open kernel modules)."""
_NOT_AVAILABLE = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE, of memory that the driver does not manage, as on Windows."""
_CLOCK_OF_MEMORY = 2
"""NVML_CLOCK_MEM."""
_CLOCK_OF_SMS = 1
"""NVML_CLOCK_SM."""
_LANE = {1: 250_000_000, 2: 500_000_000, 3: 984_615_384, 4: 1_969_230_769, 5: 3_938_461_538, 6: 7_562_500_000}
"""Bytes a second that a lane of PCIe moves each way, by generation: for the 5th 32 GT/s, of which 128 in 130 bits are data."""
_GPM_VERSION = 1
"""NVML_GPM_SUPPORT_VERSION and NVML_GPM_METRICS_GET_VERSION."""
_DRAM_BW_UTIL, _PCIE_TX_PER_SEC, _PCIE_RX_PER_SEC = 10, 20, 21
"""nvmlGpmMetricId_t: percent of the memory's theoretical maximum; MiB a second "from this GPU" and "to this GPU"."""
_MOST_METRICS = 1024
"""Room for more than NVML_GPM_METRIC_MAX, which grows: 98 at first, 477 of nvidia-ml-py 13.615. Only those counted are read."""
_SHORTEST = 0.25
"""Seconds. NVML renews what it counts each 100 ms, and over this long it is right within 2 % (H100)."""
_MOST_RATE = 2
"""Times what the memory can move that nothing is above, PCIe neither: what shows more, as between samples of which one is from
before the GPU's counters began again, is no count of anything, and left out.
"""


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = (
        ("process", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Support(ctypes.Structure):
    """nvmlGpmSupport_t."""

    _fields_ = (("version", ctypes.c_uint), ("supported", ctypes.c_uint))


class _Metric(ctypes.Structure):
    """nvmlGpmMetric_t."""

    _fields_ = (("id", ctypes.c_uint), ("failed", ctypes.c_uint), ("value", ctypes.c_double), ("names", ctypes.c_char_p * 3))


class _Metrics(ctypes.Structure):
    """nvmlGpmMetricsGet_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("before", ctypes.c_void_p),
        ("after", ctypes.c_void_p),
        ("metrics", _Metric * _MOST_METRICS),
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

    def bandwidth(self) -> int | None:
        """Bytes a second that the GPU's memory can move: two for each clock, as wide as the bus.

        CUDA C++ Best Practices Guide, "Theoretical Bandwidth Calculation". It is 3.35 TB/s on an H100 of the SXM kind.
        """
        clock, bits = self._clock(_CLOCK_OF_MEMORY), self._number("nvmlDeviceGetMemoryBusWidth")
        return clock * 2 * bits // 8 if clock and bits else None

    def sm_clock(self) -> int | None:
        """The most clocks a second of its SMs."""
        return self._clock(_CLOCK_OF_SMS)

    def link(self) -> int | None:
        """Bytes a second that its PCIe link moves each way at most, as it is built in this host."""
        generation = self._number("nvmlDeviceGetMaxPcieLinkGeneration")
        lanes = self._number("nvmlDeviceGetMaxPcieLinkWidth")
        return _LANE[generation] * lanes if generation in _LANE and lanes else None

    def _clock(self, kind: int) -> int | None:
        megahertz = ctypes.c_uint()
        failed = self._library.nvmlDeviceGetMaxClockInfo(self._handle, kind, ctypes.byref(megahertz))
        return None if failed or not megahertz.value else megahertz.value * 10**6

    def _number(self, function: str) -> int | None:
        """What a function of the GPU answers that gives one number."""
        number = ctypes.c_uint()
        return None if getattr(self._library, function)(self._handle, ctypes.byref(number)) else number.value

    def traffic(self, clock: Callable[[], float] = time.monotonic) -> "Traffic | None":
        """What counts the bytes that the GPU moves from now on, which NVML calls GPM: GPU performance monitoring.

        None where that is not supported: before Hopper, and on parts of GPUs (MIG, vGPU).
        """
        support, peak, library = _Support(version=_GPM_VERSION), self.bandwidth(), self._library
        if library.nvmlGpmQueryDeviceSupport(self._handle, ctypes.byref(support)) or not support.supported or peak is None:
            return None
        samples = ctypes.c_void_p(), ctypes.c_void_p()
        if any(library.nvmlGpmSampleAlloc(ctypes.byref(each)) for each in samples):
            return None
        found = Traffic(library, self._handle, peak, samples, clock)
        return found if found.begin() else None


class Traffic:
    """Counts the bytes that a GPU moves, for all programs, from rates between two samples that are taken in turn.

    One thread at a time. It lives as long as its process, and nothing raises.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        handle: ctypes.c_void_p,
        bandwidth: int,
        samples: tuple[ctypes.c_void_p, ctypes.c_void_p],
        clock: Callable[[], float],
    ) -> None:
        self.bandwidth = bandwidth
        self._library = library
        self._handle = handle
        self._before, self._after = samples
        self._clock = clock
        self._since = 0.0
        self._bytes: dict[str, float] = {}
        self._units = {"memory": bandwidth / 100, "pcie_in": float(1 << 20), "pcie_out": float(1 << 20)}
        """What one of a metric is in bytes a second. NVML means directions as the GPU sees them, and so do these names."""
        self._metrics = _Metrics(version=_GPM_VERSION, count=len(self._units))
        for metric, number in zip(self._metrics.metrics, (_DRAM_BW_UTIL, _PCIE_RX_PER_SEC, _PCIE_TX_PER_SEC), strict=False):
            metric.id = number

    def begin(self) -> bool:
        """Count from now on. Returns whether it can."""
        failed = self._library.nvmlGpmSampleGet(self._handle, self._before)
        self._since = self._clock()
        return not failed

    def read(self) -> dict[str, int]:
        """Bytes since it began: of the GPU's `memory`, read and written; over PCIe into the GPU (`pcie_in`) and out of it.

        Takes some 0.1 ms. Asks once in a quarter of a second at most; what could not be read is in the next reading, and
        nothing is there before the first.
        """
        if self._clock() - self._since >= _SHORTEST and not self._library.nvmlGpmSampleGet(self._handle, self._after):
            self._add(self._clock())
        return {name: round(count) for name, count in self._bytes.items()}

    def _add(self, now: float) -> None:
        asked = self._metrics
        asked.before, asked.after = self._before, self._after
        if self._library.nvmlGpmMetricsGet(ctypes.byref(asked)):
            return
        found = dict(zip(self._units, asked.metrics, strict=False))
        if any(each.failed or not math.isfinite(each.value) for each in found.values()):
            return
        rates = {name: max(0.0, metric.value) * self._units[name] for name, metric in found.items()}
        if max(rates.values()) <= _MOST_RATE * self.bandwidth:
            for name, rate in rates.items():
                self._bytes[name] = self._bytes.get(name, 0.0) + rate * (now - self._since)
        self._since = now
        self._before, self._after = self._after, self._before


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
