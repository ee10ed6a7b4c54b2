"""A child for `building.builds` on a simulated GPU, where TensorRT-RTX's builder acts as a version of TensorRT's.

Run as `python -m tests.engines.as_tensorrt FOLDER VERSION`: what follows on the command line is for the child. It writes the
GPU that it was given to a file in FOLDER.
"""

import os
import sys
from pathlib import Path

from engines.tensorrt import build_child
from engines.tensorrt.api import find_tensorrt
from tests.simulation import Gpu, installed
from tests.simulation.building import building_as
from tests.simulation.tensorrt import library


def command(folder: Path, version: str) -> list[str]:
    """The command that starts this child, for `engines.Builds`."""
    return [sys.executable, "-m", __name__, str(folder), version]


def main(folder: Path, version: str) -> int:
    """Build as `engines.tensorrt.build_child` does; refused where the GPU was hidden from this process."""
    gpu, rtx = Gpu(), find_tensorrt(["tensorrt_rtx"]).module
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 1
    with installed(gpu, library(gpu, "tensorrt", version, **building_as(gpu, rtx, "tensorrt", version))):
        status = build_child.main()
    if "Device.set_current" in gpu.log:
        (folder / f"gpu-{gpu.index}").touch()
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
