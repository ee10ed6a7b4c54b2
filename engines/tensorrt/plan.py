"""A deserialised plan: its properties, its settings, and what all of its instances share."""

import logging
import re
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from partitions import PartitionError
from partitions.cuda.current_context import restored
from partitions.cuda.device import CudaDevice, CudaPartition
from partitions.cuda.driver_memory import Taken

from ..errors import ExecutionFailed, TensorMismatch
from ..model_files.profiles import Profile, best_profile, choose, usual
from ..settings import RuntimeSettings
from ..signature import Shape, Signature, TensorSpec
from ..warmup import shape_sets
from .api import TensorRT
from .building.builds import Builds
from .graph_mode import EngineTraits
from .kernel_cache import CacheKey, KernelsRequest, RuntimeCache, cached_kernel_bytes, open_cache
from .shared_kernels import KernelCaches, SharedKernels
from .verifying import Verifier

log = logging.getLogger("greenlane.engines")


class LogOnce:
    """Remembers the messages of one engine. Any thread may call."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._lock = Lock()

    def __call__(self, level: int, text: str) -> None:
        """Log the text, unless it was logged before."""
        with self._lock:
            if text in self._logged:
                return
            self._logged.add(text)
        log.log(level, "%s", text)


_INVALID_CLUSTER_SIZE = re.compile(r"\berr(or)? 912\b|INVALID_CLUSTER_SIZE")
_NO_CLUSTERS = (
    "its kernels are launched as clusters of thread blocks, which these SMs do not take; "
    "use granules of 8 SMs or more, or more of them"
)


class LoadedPlan:
    """A plan on a device and the settings to run it with. Any thread may call.

    `plan` is the library's engine (ICudaEngine), None once closed, and where nothing but its description was read. `caches` are
    the shared ones and the engine to make them of; without them it shares its kernels with no other.
    """

    def __init__(
        self,
        path: Path,
        device: CudaDevice,
        api: TensorRT,
        plan: Any,
        signature: Signature,
        profiles: Sequence[Profile],
        settings: RuntimeSettings,
        traits: EngineTraits,
        key: CacheKey,
        builds: Builds | None = None,
        weights: int = 0,
        caches: tuple[KernelCaches, Any] | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self.path = path
        self.device = device
        self.api = api
        self.plan = plan
        self.signature = signature
        self.profiles = tuple(profiles)
        self.settings = settings
        self.traits = traits
        self.verifier = verifier
        """Judges its answers for each set of shapes; None if they are not verified."""
        self.weights = weights
        """Bytes of weights on the GPU, until it is closed."""
        self.context_bytes = int(getattr(plan, "device_memory_size_v2", 0))
        """Bytes of the GPU's memory that each context takes."""
        self._key = key
        self.kernels = self._shared_kernels(*caches) if caches else SharedKernels(self.open_kernel_cache)
        """For instances with captured graphs."""
        self._builds = builds
        self._log_once = LogOnce()

    def __repr__(self) -> str:
        return f"<LoadedPlan {self.path.name} {self.signature!r}, {self.api}>"

    @property
    def structure(self) -> Hashable:
        """What its kernels depend on: equal for engines that have the same."""
        return self._key

    @property
    def streamed(self) -> int:
        """Bytes of weights that each inference streams from the host."""
        return self.traits.streamed

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The inputs, then the outputs."""
        return (*self.signature.inputs, *self.signature.outputs)

    @property
    def usable(self) -> Sequence[int]:
        """The numbers of the profiles that inferences may use: all of them, or the one that the settings name."""
        return range(len(self.profiles)) if self.settings.profile is None else (self.settings.profile,)

    @property
    def context_memory(self) -> tuple[int, ...]:
        """The size in bytes of the device memory to give each context; empty where the library allocates it."""
        return (max(1, self.plan.device_memory_size_v2),) if self.settings.allocation_strategy == "user_managed" else ()

    @property
    def executor_memory(self) -> dict[str, int]:
        """See `Engine.executor_memory`: a context for each usable profile, and tensors of the largest shapes."""
        largest = [self.shapes(profile, "max") for profile in self.usable]
        inputs = [max(spec.nbytes(each[place]) for each in largest) for place, spec in enumerate(self.signature.inputs)]
        outputs = 0
        with suppress(TensorMismatch):  # The largest sizes of several inputs need not go together.
            outputs = max(self.signature.output_bytes(self.signature.check(each)) for each in largest)
        return {"contexts": len(largest) * self.context_bytes, "buffers": sum(inputs) + outputs}

    def shapes(self, profile: int, which: str) -> tuple[Shape, ...]:
        """The `min`, `opt` or `max` shape of each input in a profile."""
        ranges = self.profiles[profile].ranges
        return tuple(getattr(ranges[spec.name], which) if spec.name in ranges else spec.shape for spec in self.signature.inputs)

    def warm_up_shapes(self, profile: int) -> list[tuple[Shape, ...]]:
        """The sets of input shapes to warm an executor up with, the most usual one last. Raises ModelRefused."""
        asked, sizes = self.settings.warm_up, self.profiles[profile]
        if isinstance(asked, str):
            return usual(sizes, self.signature.inputs)[0 if asked == "usual" else -1 :]
        names = [spec.name for spec in self.signature.inputs]
        sets = shape_sets(asked, self.signature, self.shapes(profile, "opt"))
        return [shapes for shapes in sets if sizes.fits(dict(zip(names, shapes, strict=True)))]

    def profiles_for(self, partition: CudaPartition) -> list[int]:
        """The usable profiles, the best one for such a partition first."""
        best = best_profile(self.profiles, self.usable, partition.size)
        return [best, *(each for each in self.usable if each != best)]

    def warm_up_sets(self, partition: CudaPartition) -> list[tuple[Shape, ...]]:
        """The sets of all of these profiles, the best one's last. Raises ModelRefused."""
        best, *others = self.profiles_for(partition)
        return [shapes for each in (*others, best) for shapes in self.warm_up_shapes(each)]

    def profile_for(self, shapes: Sequence[Shape], active: int) -> int:
        """The profile to run these shapes with: `active` if it fits. Raises TensorMismatch if none of several fits."""
        return self.usable[0] if len(self.usable) == 1 else choose(self.profiles, self.signature, shapes, active)

    @property
    def pads(self) -> bool:
        """Whether rows may be added to an inference, so that it runs as a larger batch."""
        return self.settings.pads(self.signature)

    def check_execution(self, refused: str) -> None:
        """Raise ExecutionFailed if `refused`, the library's error text, is not empty."""
        if refused:
            hint = f"; {_NO_CLUSTERS}" if _INVALID_CLUSTER_SIZE.search(refused) else ""
            raise ExecutionFailed(f"running {self.path.name}: {refused}{hint}")

    def _shared_kernels(self, caches: KernelCaches, maker: Any) -> SharedKernels:
        where = (self.device.index, self._key, self.settings.cache_file(self.path))
        return caches.of(where, lambda: self.open_kernel_cache(maker))

    def open_kernel_cache(self, maker: Any = None) -> RuntimeCache:
        """A kernel cache, which the caller closes. It holds what other caches and processes have saved in the same file.

        It is made of the engine `maker`, by default of the one that first uses it. Blocks to read the file.
        """
        taken = Taken(self.device.driver_memory, ("kernels", self.structure))
        return open_cache(self.settings.cache_file(self.path) or "", self._key, warn=self.warn_once, maker=maker, taken=taken)

    def compile_kernels_in_child(self, partition: CudaPartition) -> None:
        """Let a child process compile the kernels for such a partition, if that is enabled and none are cached.

        Blocks for seconds. Raises ModelRefused if that failed: then binding compiles them in this process. Raises Cancelled
        once the builds are closed.
        """
        file = self.settings.cache_file(self.path)
        if not (self._builds and self._builds.compiles and file and partition.granules):
            return
        if "cache_path" not in self.api.features or cached_kernel_bytes(file, self._key):
            return
        settings = self.settings.merge(cache_path=file.absolute(), verify="off")
        request = KernelsRequest(self.path.absolute(), settings, len(partition.granules), self.device.granules[0], self._key)
        with self.device.driver_memory.changing_in_child():
            self._builds.compile_kernels(request, self.device.index)

    def warn_once(self, text: str) -> None:
        """Log a warning about this engine, unless it was logged before."""
        self._log_once(logging.WARNING, f"{self.path}: {text}")

    def log_staging(self) -> None:
        """Log, once for this engine, that its inputs or outputs are copied through pinned memory."""
        text = "inputs or outputs are staged through the host, as their memory is not pinned"
        self._log_once(logging.INFO, f"{self.path.name}: {text}")

    def missing_sms(self, partition: CudaPartition, profile: int) -> int:
        """How many SMs the partition has fewer than the profile is meant for."""
        return max(0, (self.profiles[profile].sms or 0) - partition.size)

    def warn_of_tuning(self, partition: CudaPartition, profile: int) -> None:
        """Warn, once for a partition's granules, that a profile is meant for more SMs than the partition has."""
        if self.missing_sms(partition, profile):
            meant = self.profiles[profile]
            how = "tuned" if meant.tuned else "meant"
            hazard = ", where kernels whose blocks wait for each other may fail or never end" if meant.tuned else ""
            self.warn_once(
                f"profile {profile} is {how} for {meant.sms} SMs and runs on {partition.size} of {partition!r}{hazard}; build "
                f"one for this size with --profile --sms {partition.size}"
            )

    def close(self) -> None:
        """Save and free the kernels, and free the weights; all instances must be closed. The thread's current CUDA context does
        not change.
        """
        if self.plan is None:
            return
        with restored():
            with suppress(PartitionError):  # The library saves no kernels in a thread without a context.
                self.device.make_current()
            self.kernels.retire()
            with self.device.driver_memory.changing():
                self.plan = None
