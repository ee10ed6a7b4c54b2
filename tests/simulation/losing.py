"""`python -m tests.gpu.losing` on a simulated GPU with a simulated TensorRT."""

from collections.abc import Callable
from contextlib import ExitStack
from time import sleep
from unittest.mock import patch

from partitions import Device
from server import __main__ as command
from server.config.schema import DeviceConfig
from server.host.leaving import leave
from tests.gpu import losing as real

from . import Gpu, installed, kernels
from .streams import Stream
from .tensorrt import library

_SIMULATION = ExitStack()
"""Never left: the process that has the device ends with it."""


def trap(gpu: Gpu, stream: Stream, blocks: int, cycles: int) -> Callable[[], None]:
    """The device is lost when the stream comes to it."""

    def run() -> None:
        raise gpu.lose("CUDA_ERROR_LAUNCH_FAILED")

    return run


def spin(gpu: Gpu, stream: Stream, blocks: int, nanoseconds: int) -> Callable[[], None]:
    """The stream comes no further."""
    return lambda: sleep(nanoseconds / 1e9)


def opener(config: DeviceConfig) -> Device:
    """As in tests.gpu.losing, with the simulation in place of the libraries from then on."""
    gpu = Gpu(index=config.index)
    _SIMULATION.enter_context(installed(gpu, library(gpu)))
    _SIMULATION.enter_context(patch.dict(kernels.KERNELS, trap=trap, spin=spin))
    return real.opener(config)


def serve() -> int:
    from tests.simulation import losing

    command.open_configured = losing.opener
    return command.main()


if __name__ == "__main__":
    leave(serve())
