"""A deserialised plan: what is known of it, and what all that is made of it shares."""

import logging
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from cuda.core import Device, Kernel

from partitions.cuda.current_context import restored
from partitions.cuda.device import CudaDevice, CudaPartition

from ..errors import ExecutionFailed, ModelRefused
from ..model_files.profiles import Profile, choose, usual
from ..settings import RuntimeSettings
from ..signature import Shape, Signature, TensorSpec
from ..warmup import shape_sets
from .api import TensorRT
from .building.builds import Builds
from .building.kernels import Kernels
from .copies import compile_kernels
from .graph_mode import Situation
from .kernel_cache import CacheKey, RuntimeCache, kept_kernels, open_cache
from .notice import StagingNotice

log = logging.getLogger("greenlane.engines")


class LoadedPlan:
    """A plan on a device, with the settings it is run with. `plan` is the library's engine, None once closed. Any thread."""

    def __init__(
        self,
        path: Path,
        device: CudaDevice,
        api: TensorRT,
        plan: Any,
        signature: Signature,
        profiles: Sequence[Profile],
        settings: RuntimeSettings,
        situation: Situation,
        key: CacheKey,
        builds: Builds | None = None,
    ) -> None:
        self.path = path
        self.device = device
        self.api = api
        self.plan = plan
        self.signature = signature
        self.profiles = tuple(profiles)
        self.settings = settings
        self.situation = situation
        self.notice = StagingNotice(path.name)
        self._key = key
        self._builds = builds
        self._copying: tuple[Kernel, Kernel] | None = None
        self._compiling = Lock()
        self._said: set[str] = set()
        self._tuning: set[tuple[tuple[int, ...], int]] = set()

    def __repr__(self) -> str:
        return f"<LoadedPlan {self.path.name} {self.signature!r}, {self.api}>"

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Inputs, then outputs."""
        return (*self.signature.inputs, *self.signature.outputs)

    @property
    def usable(self) -> Sequence[int]:
        """Numbers of the profiles that may be run with."""
        return range(len(self.profiles)) if self.settings.profile is None else (self.settings.profile,)

    @property
    def context_memory(self) -> tuple[int, ...]:
        """Bytes of device memory that each context has to be given: one number, or none where the library allocates."""
        return (max(1, self.plan.device_memory_size_v2),) if self.settings.allocation_strategy == "user_managed" else ()

    def shapes(self, profile: int, which: str) -> tuple[Shape, ...]:
        """The `min`, `opt` or `max` shape of each input in a profile."""
        ranges = self.profiles[profile].ranges
        return tuple(getattr(ranges[spec.name], which) if spec.name in ranges else spec.shape for spec in self.signature.inputs)

    def usual(self, profile: int) -> list[tuple[Shape, ...]]:
        """Sets of shapes that an executor is warmed up with, the most usual last. Raises ModelRefused."""
        asked, sizes = self.settings.warm_up, self.profiles[profile]
        if isinstance(asked, str):
            return usual(sizes, self.signature.inputs)[0 if asked == "usual" else -1 :]
        names = [spec.name for spec in self.signature.inputs]
        sets = shape_sets(asked, self.signature, self.shapes(profile, "opt"))
        return [shapes for shapes in sets if sizes.fits(dict(zip(names, shapes, strict=True)))]

    def profile_for(self, shapes: Sequence[Shape], active: int) -> int:
        """The profile to run these shapes with. Raises TensorMismatch where there are several and none fits."""
        return self.usable[0] if len(self.usable) == 1 else choose(self.profiles, self.signature, shapes, active)

    @property
    def pads(self) -> bool:
        """Whether rows may be added to an inference, so that it runs as a larger batch."""
        return self.settings.pads(self.signature)

    def check_execution(self, refused: str) -> None:
        """Raise ExecutionFailed with what the library said, unless that is nothing."""
        if refused:
            raise ExecutionFailed(f"running {self.path.name}: {refused}")

    def copy_kernels(self, device: Device) -> tuple[Kernel, Kernel]:
        """What SMs copy inputs and outputs with: compiled for the first executor, which takes some 0.1 s, and kept for all.

        `device` must be current in the calling thread. Raises PartitionError.
        """
        with self._compiling:
            self._copying = self._copying or compile_kernels(device)
            return self._copying

    def open_kernels(self) -> RuntimeCache:
        """The kernels compiled before, by other executors and processes too, for one executor that uses and closes it.

        Each has its own, kept in the same file, as executors are used by several threads at once. Blocks to read the file.
        """
        cache = open_cache(self.settings.cache_file(self.path) or "", self._key, warn=self.warn_once)
        cache.leave_to_owner()
        return cache

    def have_kernels(self, partition: CudaPartition) -> None:
        """Have another process compile for such a partition, where that is wanted and nothing is kept. Blocks, for seconds.

        Where it fails that is a warning, and the kernels are compiled here. Raises Cancelled once builds are closed.
        """
        where = self.settings.cache_file(self.path)
        if not (self._builds and self._builds.compiles and where and partition.granules):
            return
        if "cache_path" not in self.api.features or kept_kernels(where, self._key):
            return
        settings = self.settings.merge(cache_path=where.absolute())
        wanted = Kernels(self.path.absolute(), settings, len(partition.granules), self.device.granules[0])
        try:
            self._builds.kernels(wanted, self.device.index)
        except ModelRefused as refusal:
            self.warn_once(str(refusal))

    def warn_once(self, text: str) -> None:
        """Log a warning about this engine, unless it was logged before."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s: %s", self.path, text)

    def warn_of_tuning(self, partition: CudaPartition, profile: int) -> None:
        """Say once a partition, that is once for its granules, that a profile is meant for more SMs than it has."""
        sms, key = self.profiles[profile].sms or 0, (partition.granules, profile)
        if sms > partition.size and key not in self._tuning:
            self._tuning.add(key)
            how = "tuned" if self.profiles[profile].tuned else "meant"
            text = "%s: profile %d is %s for %d SMs and runs on %d of %r; build one for this size with --profile --sms %d"
            log.warning(text, self.path, profile, how, sms, partition.size, partition, partition.size)

    def close(self) -> None:
        """Free the weights; everything that was made of it has to be gone. What is current in the thread stays so."""
        with restored():
            self.plan = self._copying = None
