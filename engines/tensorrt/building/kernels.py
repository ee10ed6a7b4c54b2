"""The request to compile a plan's kernels in another process, so that the process that serves finds them on disk.

A library that compiles at run time also loads each kernel as soon as it is compiled. While the driver loads a kernel, it holds
a lock that every tenant's launches wait for: for milliseconds if the driver itself still has to compile for the GPU, and for a
fraction of that if it finds the result in its own cache on disk ($CUDA_CACHE_PATH). The other process fills that cache too.
"""

from dataclasses import dataclass
from pathlib import Path

from ...settings import RuntimeSettings
from ..kernel_cache import CacheKey


@dataclass(frozen=True, slots=True)
class KernelsRequest:
    """The request to compile a plan's kernels for a partition of `granules` granules of `granule_sms` SMs each.

    `settings` are those to run the plan with; their `cache_path` is the file to save the kernels in, by this `key`.
    """

    plan_path: Path
    settings: RuntimeSettings
    granules: int
    granule_sms: int
    key: CacheKey
