"""A simulated GPU, and `cuda.core` and `cuda.bindings.driver` on top of it: what partitions/ uses of them, and no more.

It is as unhelpful as the real thing where that has cost somebody a day: a second split of the device overlaps the first
without a word, an error on the device comes out of a later call and then out of every call, and what the device writes
to host memory is not there before the stream was waited for. Where the real thing would leak or crash, it raises Misuse.
tests/partitions/test_cuda_manifest.py holds its names and parameters against the real packages.
"""

from .gpu import Gpu, Misuse
from .install import installed

__all__ = ["Gpu", "Misuse", "installed"]
