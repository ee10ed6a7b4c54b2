"""Kernels compiled for a plan by another process, so that the one that serves finds them on disk.

Where a library compiles at run time, it loads each kernel as soon as it is compiled, and the driver keeps a lock meanwhile
that every tenant's launches wait for. Loading takes milliseconds where the driver has to compile, too, and a fraction where
the driver finds that in its own cache on disk ($CUDA_CACHE_PATH), which the other process fills as well.
"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ...settings import RuntimeSettings


@dataclass(frozen=True, slots=True)
class Kernels:
    """What is to be compiled: for a plan, run with these settings on so many granules of so many SMs.

    `settings.cache_path` is the file to keep the kernels in.
    """

    plan_path: Path
    settings: RuntimeSettings
    granules: int
    granule_sms: int


def compile_kernels(wanted: Kernels, gpu: int) -> None:
    """Set the plan up on a partition of this process's own, which compiles and keeps everything it is warmed up with.

    `gpu` is the ordinal. Blocks, perhaps for a minute. Raises ModelRefused, DeviceUnavailable, PartitionError.
    """
    from partitions import open_device  # In a process that only builds there is no CUDA.

    from ..load import load_tensorrt

    with (
        closing(open_device("cuda", index=gpu, granule_sms=wanted.granule_sms)) as device,
        closing(device.carve(range(wanted.granules))) as partition,
        closing(load_tensorrt(wanted.plan_path, device, wanted.settings)) as engine,  # type: ignore[arg-type]
        closing(engine.bind(partition)),
    ):
        return
