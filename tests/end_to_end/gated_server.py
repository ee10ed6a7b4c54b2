"""`python -m server`, except that a device side learns which models there are once a FIFO named `gate` is opened.

It is beside the repository. A FIFO named `late` there is such a gate for a model of that name, whenever it is loaded. With
--device cores have a device process, as a GPU has. No device can be opened while there is a file that NO_DEVICE names.
"""

import os
import sys

from partitions import Device, DeviceUnavailable
from server import __main__ as command
from server.app import open_configured
from server.config.schema import DeviceConfig
from server.device.loaded_model import PreparedModel
from server.device.model_loader import ModelLoader
from server.host.leaving import leave

_names = ModelLoader.names
_prepare = ModelLoader.prepare


def gated(self: ModelLoader) -> list[str]:
    """Wait until the test opens the gate, and lets it go. Blocks."""
    _pass(self, "gate")
    return _names(self)


def late(self: ModelLoader, name: str, *rest: object) -> PreparedModel:
    """The same before this model is read. Blocks."""
    if name == "late":
        _pass(self, name)
    return _prepare(self, name, *rest)  # type: ignore[arg-type]


def _pass(loader: ModelLoader, name: str) -> None:
    gate = loader._repository._root.parent / name
    if gate.exists():
        gate.read_bytes()


def opener(config: DeviceConfig) -> Device:
    """Open a device, in the process that loads its models."""
    ModelLoader.names = gated  # type: ignore[method-assign]
    ModelLoader.prepare = late  # type: ignore[method-assign, assignment]
    if (gone := os.environ.get("NO_DEVICE")) and os.path.exists(gone):
        raise DeviceUnavailable("core 1 is gone")
    return open_configured(config)


def serve() -> int:
    """Serve as the command line says."""
    from tests.end_to_end import gated_server

    if "--device" in sys.argv:
        sys.argv.remove("--device")
        command.on_host_cores = lambda _: False
    command.open_configured = gated_server.opener  # By a name that the processes can import.
    return command.main()


if __name__ == "__main__":
    leave(serve())
