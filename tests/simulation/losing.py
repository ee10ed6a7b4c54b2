"""`python -m tests.gpu.losing` on a simulated GPU with a simulated TensorRT."""

import sys
from collections.abc import Callable
from unittest.mock import patch

from . import Gpu, installed, kernels
from .streams import Stream
from .tensorrt import library


def trap(gpu: Gpu, stream: Stream, blocks: int, cycles: int) -> Callable[[], None]:
    """The device is lost when the stream comes to it."""

    def run() -> None:
        raise gpu.lose("CUDA_ERROR_LAUNCH_FAILED")

    return run


def serve() -> int:
    gpu = Gpu()
    with installed(gpu, library(gpu)), patch.dict(kernels.KERNELS, trap=trap):
        from tests.gpu import losing

        return losing.serve()


if __name__ == "__main__":
    sys.exit(serve())
