"""`python -m server`, except that a device side learns which models there are once a FIFO named `gate` is opened.

It is beside the repository. With --device cores have a device process, as a GPU has.
"""

import sys

from partitions import Device
from server import __main__ as command
from server.app import open_configured
from server.config.schema import DeviceConfig
from server.device.model_loader import ModelLoader
from server.host.leaving import leave

_names = ModelLoader.names


def gated(self: ModelLoader) -> list[str]:
    """Wait until the test opens the gate, and lets it go. Blocks."""
    gate = self._repository._root.parent / "gate"
    if gate.exists():
        gate.read_bytes()
    return _names(self)


def opener(config: DeviceConfig) -> Device:
    """Open a device, in the process that loads its models."""
    ModelLoader.names = gated  # type: ignore[method-assign]
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
