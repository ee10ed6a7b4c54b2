"""`libnvidia-ml.so.1` for a simulated GPU, as far as `partitions.cuda.nvml` uses it, as ctypes loads it.

As seen on an H200 with driver 580.159 (2026-11-27), a process is listed with the memory that it has, as soon as it has it. What
other drivers list, and where: see `Gpu.listed`.
"""

import ctypes
import math
import os
from typing import Any

from .errors import CUDAError
from .gpu import Gpu

NAME = "libnvidia-ml.so.1"
NOT_SUPPORTED, INSUFFICIENT_SIZE, UNKNOWN = 3, 7, 999
MHZ = {1: 1980, 2: 2619}
"""The most of NVML_CLOCK_SM and NVML_CLOCK_MEM of an H100, of the SXM kind."""
GPM = 10, 21, 20
"""NVML_GPM_METRIC_DRAM_BW_UTIL in percent, PCIE_RX_PER_SEC and PCIE_TX_PER_SEC in MiB a second."""
OTHERS = 1
"""The number of the process that has what `Gpu.others_have` says."""


class Library:
    """Functions return 0, or the number of an error."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._samples: dict[int, Any] = {}

    def nvmlInit_v2(self) -> int:
        return self._entered("nvmlInit_v2")

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, handle: Any) -> int:
        return self._entered("nvmlDeviceGetHandleByPciBusId_v2")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, millijoules: Any) -> int:
        if self._gpu.millijoules is None:
            return NOT_SUPPORTED
        millijoules._obj.value = self._gpu.millijoules
        return 0

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int, megahertz: Any) -> int:
        megahertz._obj.value = MHZ[kind]
        return self._entered("nvmlDeviceGetMaxClockInfo")

    def nvmlDeviceGetMemoryBusWidth(self, handle: Any, bits: Any) -> int:
        bits._obj.value = 5120
        return self._entered("nvmlDeviceGetMemoryBusWidth")

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, generation: Any) -> int:
        generation._obj.value = 5
        return self._entered("nvmlDeviceGetMaxPcieLinkGeneration")

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, lanes: Any) -> int:
        lanes._obj.value = 16
        return self._entered("nvmlDeviceGetMaxPcieLinkWidth")

    def nvmlGpmQueryDeviceSupport(self, handle: Any, support: Any) -> int:
        assert support._obj.version == 1
        support._obj.supported = self._gpu.moved is not None
        return self._entered("nvmlGpmQueryDeviceSupport")

    def nvmlGpmSampleAlloc(self, sample: Any) -> int:
        sample._obj.value = 0x1000 * (len(self._samples) + 1)
        self._samples[sample._obj.value] = None
        return self._entered("nvmlGpmSampleAlloc")

    def nvmlGpmSampleGet(self, handle: Any, sample: Any) -> int:
        assert sample.value in self._samples, "it was not allocated"
        if failed := self._entered("nvmlGpmSampleGet"):
            return failed
        self._samples[sample.value] = self._gpu.seconds, self._gpu.moved
        return 0

    def nvmlGpmMetricsGet(self, request: Any) -> int:
        """Rates between two samples; no numbers if they are of the same 100 ms, as on an H100."""
        asked = request._obj
        assert asked.version == 1
        (began, before), (ended, after) = self._samples[asked.before], self._samples[asked.after]
        apart = ended - began
        units = 2619e6 * 2 * 5120 / 8 / 100, 1 << 20, 1 << 20
        rates = [
            (new - old) / apart / unit if apart >= 0.1 else math.nan
            for old, new, unit in zip(before, after, units, strict=True)
        ]
        for metric in asked.metrics[: asked.count]:
            metric.value, metric.failed = rates[GPM.index(metric.id)], 0
        return self._entered("nvmlGpmMetricsGet")

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, infos: Any) -> int:
        if failed := self._entered("nvmlDeviceGetComputeRunningProcesses_v3"):
            return failed
        listed = {os.getpid(): self._gpu.has, OTHERS: self._gpu.others_have}
        listed = listed if self._gpu.listed is None else self._gpu.listed(listed)
        room, count._obj.value = count._obj.value, len(listed)
        if room < len(listed):
            return INSUFFICIENT_SIZE
        for info, (process, used) in zip(infos, listed.items(), strict=False):
            info.process, info.used = process, used
        return 0

    def _entered(self, call: str) -> int:
        try:
            self._gpu.enter(call)
        except CUDAError:
            return UNKNOWN
        return 0


def loader(gpu: Gpu) -> type[ctypes.CDLL]:
    """`ctypes.CDLL` that finds this library, if the GPU's host has one, and loads others as ever."""

    class CDLL(ctypes.CDLL):
        def __new__(cls, name: str | None, *arguments: Any, **options: Any) -> Any:
            if name != NAME:
                return super().__new__(cls)
            if not gpu.has_nvml:
                raise OSError(f"{NAME}: cannot open shared object file: No such file or directory")
            return Library(gpu)

    return CDLL
