"""`python -m server`, except that a byte in the FIFO $LOSE has the GPU run a kernel that traps: the device is lost then."""

import os
from pathlib import Path
from threading import Thread

from partitions import Device
from server import __main__ as command
from server.app import open_configured
from server.config.schema import DeviceConfig
from server.host.leaving import leave

SOURCE = r"""
extern "C" __global__ void trap(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles);
    asm("trap;");
}
"""
CYCLES = 500_000_000
"""A quarter of a second, for requests to pile up: the kernel has every SM meanwhile."""
BLOCKS, THREADS = 1024, 1024


def lose(index: int) -> None:
    """Run the kernel in the process's primary context of this GPU, and raise its error."""
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(index)
    device.set_current()
    program = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{device.arch}"))
    kernel, stream = program.compile("cubin").get_kernel("trap"), device.create_stream()
    launch(stream, LaunchConfig(grid=BLOCKS, block=THREADS), kernel, CYCLES)
    stream.sync()


def opener(config: DeviceConfig) -> Device:
    """Open the device, in the process that has it, and lose it when something is written to the FIFO."""
    Thread(target=_lose_on_request, args=(config.index,), name="losing", daemon=True).start()
    return open_configured(config)


def _lose_on_request(index: int) -> None:
    if Path(os.environ["LOSE"]).read_bytes():
        lose(index)


def serve() -> int:
    """Serve as the command line says."""
    from tests.gpu import losing

    command.open_configured = losing.opener  # By a name that the device process can import.
    return command.main()


if __name__ == "__main__":
    leave(serve())
