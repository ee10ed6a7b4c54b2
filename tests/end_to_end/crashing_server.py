"""`python -m server`, except that a model named `crash` ends the process that loads it, as a library that fails in C does.

The device is lost when a model named `lose` runs other inputs than zeros, as a GPU is after an illegal address.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from engines.base import Tensor
from engines.onnxruntime.engine import OnnxExecutor, OnnxWork
from partitions import Device, DeviceLost
from server import __main__ as command
from server.app import open_configured
from server.config.schema import DeviceConfig
from server.device.loaded_model import PreparedModel
from server.device.model_loader import ModelLoader
from server.host.leaving import leave

_prepare = ModelLoader.prepare
_enqueue = OnnxExecutor.enqueue


def _crash(self: ModelLoader, name: str, *rest: object) -> PreparedModel:
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return _prepare(self, name, *rest)  # type: ignore[arg-type]


def _lose(self: OnnxExecutor, inputs: Sequence[Tensor], *room: object) -> OnnxWork:
    (tensor,) = inputs
    if "lose" in self.engine.path.parts and any(ctypes.string_at(tensor.address, tensor.nbytes)):
        raise DeviceLost("CUDA error 700")
    return _enqueue(self, inputs, *room)  # type: ignore[arg-type]


def opener(config: DeviceConfig) -> Device:
    """Open a device, in a process whose models may crash."""
    ModelLoader.prepare = _crash  # type: ignore[method-assign, assignment]
    OnnxExecutor.enqueue = _lose  # type: ignore[method-assign, assignment]
    return open_configured(config)


def serve() -> int:
    """Serve as the command line says."""
    from tests.end_to_end import crashing_server

    if "--device" in sys.argv:
        sys.argv.remove("--device")
        command.on_host_cores = lambda _: False
    command.open_configured = crashing_server.opener  # By a name that the processes can import.
    return command.main()


if __name__ == "__main__":
    leave(serve())
