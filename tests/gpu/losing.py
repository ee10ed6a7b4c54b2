"""`python -m server`, except that SIGUSR2 has the GPU run a kernel that traps: nothing of the process works there after it."""

import signal
import sys
from threading import Thread

from server.__main__ import main

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


def lose() -> None:
    """Run the kernel in the process's primary context, and raise its error."""
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(0)
    device.set_current()
    program = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{device.arch}"))
    kernel, stream = program.compile("cubin").get_kernel("trap"), device.create_stream()
    launch(stream, LaunchConfig(grid=BLOCKS, block=THREADS), kernel, CYCLES)
    stream.sync()


def serve() -> int:
    """Serve as the command line says."""
    signal.signal(signal.SIGUSR2, lambda *_: Thread(target=lose, name="losing", daemon=True).start())
    return main()


if __name__ == "__main__":
    sys.exit(serve())
