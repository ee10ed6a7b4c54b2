"""A simulated GPU, and `cuda.core`, `cuda.bindings.driver` and TensorRT on top of it: what we use of them, and no more.

Plans carry an ONNX, so the real partitions.cuda and engines.tensorrt run on it unchanged and their numbers can be checked.
It is as unhelpful as the real thing where that has cost somebody a day: a second split of the device overlaps the first
without a word, an error on the device comes out of a later call and then out of every call, and what the device writes
to host memory is not there before the stream was waited for. Where the real thing would leak or crash, it raises Misuse.
tests/partitions/cuda/test_manifest.py and tests/engines/tensorrt/test_manifest.py hold its names and parameters against
the real packages.
"""

from .errors import Misuse
from .gpu import Gpu
from .install import installed

__all__ = ["Gpu", "Misuse", "installed"]
