"""A child for `engines.building` to whom TensorRT-RTX is TensorRT, and which writes down the GPU that it is given.

Run as `python -m tests.engines.as_tensorrt FOLDER`: what follows on the command line is the child's own.
"""

import os
import sys
from pathlib import Path
from types import ModuleType

from engines import build_child
from engines.tensorrt_api import find_tensorrt

GIVEN = Path(sys.argv[1])


class Device:
    """The one class of cuda.core that the child uses."""

    def __init__(self, index: int) -> None:
        self.index = index

    def set_current(self) -> None:
        (GIVEN / f"gpu-{self.index}").touch()


core = ModuleType("cuda.core")
vars(core)["Device"] = Device
sys.modules |= {"tensorrt": find_tensorrt(["tensorrt_rtx"]).module, "cuda.core": core}
if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    sys.exit(build_child.main())
