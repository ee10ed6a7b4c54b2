"""A simulated GPU, with `cuda.core`, `cuda.bindings.driver` and TensorRT on top of it, as far as the project uses them.

Plans carry an ONNX, so the real partitions.cuda and engines.tensorrt run on it unchanged and their results can be checked. It
behaves as the real thing does in cases that are easily missed: a second split of the device silently overlaps the first one;
an error on the device is raised by a later call and then by every call; and what the device writes to host memory is not there
before the stream was waited for. Where the real thing would leak or crash, it raises Misuse.
tests/partitions/cuda/test_manifest.py and tests/engines/tensorrt/test_manifest.py check its names and parameters against the
real packages.
"""

from .errors import Misuse
from .gpu import Gpu
from .install import installed

__all__ = ["Gpu", "Misuse", "installed"]
