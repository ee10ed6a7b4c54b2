"""The request to compile a plan's kernels in another process, so that the process that serves finds them on disk.

Where a library compiles at run time, it loads each kernel as soon as it is compiled, and the driver meanwhile holds a lock
that every tenant's launches wait for. Loading takes milliseconds where the driver has to compile too, and a fraction of that
where it finds the result in its cache on disk ($CUDA_CACHE_PATH), which the other process fills as well.
"""

from dataclasses import dataclass
from pathlib import Path

from ...settings import RuntimeSettings


@dataclass(frozen=True, slots=True)
class KernelsRequest:
    """Compile the kernels of a plan, run with these settings on so many granules of so many SMs.

    `settings.cache_path` is the file to save the kernels in.
    """

    plan_path: Path
    settings: RuntimeSettings
    granules: int
    granule_sms: int
