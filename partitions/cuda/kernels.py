"""CUDA kernels of our own, compiled from source when they are first needed and kept as long as their device."""

from threading import Lock

from cuda.core import Device, Kernel, Program, ProgramOptions

from ..errors import PartitionError
from .driver import translated


class Kernels:
    """The kernels of one device. Any thread may call.

    A kernel runs on every partition of the device: the context is that of the stream it is launched on.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._compiled: dict[str, tuple[Kernel, ...]] = {}

    def __repr__(self) -> str:
        return f"<Kernels of {len(self._compiled)} sources>"

    def compiled(self, device: Device, source: str, names: tuple[str, ...], what: str) -> tuple[Kernel, ...]:
        """The kernels of these names in CUDA C++ `source`. `device` must be current in the calling thread.

        The first call with a source compiles it, which blocks for some 0.1 s; others wait for it. Raises PartitionError, which
        says that `what` could not be compiled, or that NVRTC is missing.
        """
        with self._lock, translated(f"compiling {what}"):
            if source not in self._compiled:
                try:
                    code = Program(source, "c++", ProgramOptions(arch=f"sm_{device.arch}")).compile("cubin")
                except RuntimeError as error:  # libnvrtc was not found
                    raise PartitionError(f"compiling {what} needs NVRTC, pip install nvidia-cuda-nvrtc: {error}") from error
                self._compiled[source] = tuple(map(code.get_kernel, names))
            return self._compiled[source]

    def close(self) -> None:
        """Unload them; none may be running or be part of a graph."""
        self._compiled.clear()
