"""`python -m server`, except that a byte in the FIFO $LOSE has the GPU run a kernel that traps: the device is lost then.

With HANG set, a byte in the FIFO $HANG/<process id> has the last partition of that device process run a kernel for a minute:
what is enqueued there meanwhile does not end.
"""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

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
extern "C" __global__ void spin(long long nanoseconds) {
    long long began, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - began < nanoseconds);
}
"""
CYCLES = 500_000_000
"""A quarter of a second, for requests to pile up: the kernel has every SM meanwhile."""
BLOCKS, THREADS = 1024, 1024
MINUTE = 60_000_000_000


def lose(index: int) -> None:
    """Run the kernel in the process's primary context of this GPU, and raise its error."""
    from cuda.core import Device, LaunchConfig, launch

    device = Device(index)
    device.set_current()
    stream = device.create_stream()
    launch(stream, LaunchConfig(grid=BLOCKS, block=THREADS), _compiled(device, "trap"), CYCLES)
    stream.sync()


def hang(device: Any, partition: Any) -> None:
    """Have the partition's stream wait for the kernel."""
    from cuda.core import LaunchConfig, launch

    partition.attach()
    launch(partition.stream, LaunchConfig(grid=1, block=1), _compiled(device.make_current(), "spin"), MINUTE)


def _compiled(device: Any, name: str) -> Any:
    from cuda.core import Program, ProgramOptions

    return Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{device.arch}")).compile("cubin").get_kernel(name)


def opener(config: DeviceConfig) -> Device:
    """Open the device, in the process that has it, and lose it or hang when something is written to the FIFO."""
    if lost := os.environ.get("LOSE"):
        _when_written(Path(lost), lambda: lose(config.index))
    device: Any = open_configured(config)
    if folder := os.environ.get("HANG"):
        carve, carved = device.carve, []

        def carve_and_note(*granules: Any) -> Any:
            carved.append(carve(*granules))
            return carved[-1]

        device.carve = carve_and_note
        path = Path(folder, str(os.getpid()))
        os.mkfifo(path)
        _when_written(path, lambda: hang(device, carved[-1]))
    return device  # type: ignore[no-any-return]


def _when_written(path: Path, do: Callable[[], None]) -> None:
    """Do this, in a thread, when something is written to this FIFO."""
    Thread(target=lambda: path.read_bytes() and do(), name="losing", daemon=True).start()


def serve() -> int:
    """Serve as the command line says."""
    from tests.gpu import losing

    command.open_configured = losing.opener  # By a name that the device process can import.
    return command.main()


if __name__ == "__main__":
    leave(serve())
