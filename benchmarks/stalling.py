"""`python -m benchmarks.stalling [--virtual]`: the server, except that processes with a device keep the interpreter on request.

What holds up every tenant when something changes, on demand: for tests that have to see it. With `--virtual` it is the
server of benchmarks.virtualcores. `request` asks a process for it, over a socket that is named after the process.
"""

import ctypes
import os
import socket
import sys
from contextlib import suppress
from threading import Thread
from unittest.mock import patch

from partitions import Device
from server import __main__ as program
from server.app import open_configured
from server.config.schema import DeviceConfig
from server.host.leaving import leave

from . import virtualcores

STALL = 0.06
"""Seconds."""


def stall() -> None:
    """Keep the interpreter: unlike `ctypes.CDLL`, `PyDLL` calls without letting go of it."""
    ctypes.PyDLL(None).usleep(int(STALL * 1e6))


def request(pid: int) -> None:
    """Have this process stall, if it has a device."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking, suppress(ConnectionRefusedError):
        asking.sendto(b".", _name(pid))


def opener(config: DeviceConfig) -> Device:
    """Open the device in the process that has it, and stall there on request."""
    Thread(target=_stall_on_request, name="stalling", daemon=True).start()
    return open_configured(config)


def virtual_opener(config: DeviceConfig) -> Device:
    """The same with `--virtual`."""
    Thread(target=_stall_on_request, name="stalling", daemon=True).start()
    return virtualcores.by_turns(config)


def _stall_on_request() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asked:
        asked.bind(_name(os.getpid()))
        while asked.recv(1):
            stall()


def _name(pid: int) -> str:
    """A name without a file; see unix(7)."""
    return f"\0greenlane-stalling-{pid}"


def serve() -> int:
    """Serve as the command line says."""
    from benchmarks import stalling

    chosen = stalling.opener
    if "--virtual" in sys.argv:
        sys.argv.remove("--virtual")
        chosen = stalling.virtual_opener
    with patch.object(program, "open_configured", chosen):
        return program.main()


if __name__ == "__main__":
    leave(serve())
