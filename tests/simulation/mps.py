"""The fake MPS daemon on PATH, and its clients: the simulated GPUs of processes that have its folder in their environment."""

import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from . import mps_daemon
from .errors import CUDAError
from .mps_daemon import NAME, PIPES, Lines, server_address

ERRORS = {807: "CUDA_ERROR_MPS_SERVER_NOT_READY", 808: "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"}
DIED, ENDED, FAULT = "CUDA_ERROR_MPS_RPC_FAILURE", "CUDA_ERROR_MPS_CLIENT_TERMINATED", "CUDA_ERROR_ILLEGAL_ADDRESS"
"""What calls of clients raise when the server died (806), when they were terminated (810), and what they did when another
client's kernel failed (700).
"""


class FakeMps:
    """The fake command, in a folder that is to be on PATH; see `mps_daemon`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._behaviour = folder / "behaviour.json"
        folder.mkdir()
        (folder / NAME).write_text(
            f"#!{sys.executable} -IS\n"
            "import sys\n"
            f"sys.path.append({str(Path(mps_daemon.__file__).parent)!r})\n"
            "from mps_daemon import main\n"
            f"sys.exit(main({str(self._behaviour)!r}, *sys.argv[1:]))\n"
        )
        (folder / NAME).chmod(0o755)

    def behave(self, **behaviour: Any) -> None:
        """Behave so from now on, and otherwise as it should."""
        self._behaviour.write_text(json.dumps(behaviour))


@contextmanager
def size_of_sets(mps: str, folder: Path) -> Iterator[None]:
    """While the block runs, servers of tests/gpu have this `device.mps`, and the fake command, made in this folder, on PATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPS", mps)
        patch.setenv("PATH", f"{FakeMps(folder).folder}:{os.environ['PATH']}")
        yield


class Client:
    """The connection of this process to a server; `lose` is called with the error that is to follow each call, on a thread of
    its own.
    """

    def __init__(self, end: Lines, lose: Callable[[str], None], on_fault: Callable[[], None]) -> None:
        self._end = end
        self._lose = lose
        self._on_fault = on_fault
        self._taken = threading.Condition()
        self._waits = False
        self._ended = False
        threading.Thread(target=self._listen, name="MPS", daemon=True).start()

    def fault(self) -> None:
        """A kernel of this process failed; returns when the server and its other clients know."""
        with self._taken:
            if not self._ended:
                self._waits = True
                self._end.send("fault")
        self.wait()

    def wait(self) -> None:
        """As every call of the driver: do what the server asks for, and stand still while it waits for another client."""
        self._take()
        with self._taken:
            self._taken.wait_for(lambda: not self._waits)

    def _listen(self) -> None:
        while not self._ended:
            select.select([self._end], [], [])
            self._take()

    def _take(self) -> None:
        with self._taken:
            while not self._ended and select.select([self._end], [], [], 0)[0]:
                if (lines := self._end.read()) is None:
                    self._ended, self._waits = True, False
                    self._end.end.close()
                    self._lose(DIED)
                for line in lines or ():
                    self._on_line(line)
            self._taken.notify_all()

    def _on_line(self, line: str) -> None:
        if line == "end":
            self._lose(ENDED)
            self._end.send("ended")
        elif line == "fault":
            self._on_fault()
        else:
            self._waits = line == "hold"


def connect(lose: Callable[[str], None], on_fault: Callable[[], None]) -> Client | None:
    """Become a client, if the environment names a folder with a daemon; if there is none, go on without an error."""
    if not (pipes := os.environ.get(PIPES)):
        return None
    with socket.socket(socket.AF_UNIX) as control:
        try:
            control.connect(f"{pipes}/control")
        except OSError:
            return None
        daemon = Lines(control)
        daemon.send(f"client {os.getpid()}")
        server = daemon.next() or ""
    end = Lines(socket.socket(socket.AF_UNIX))
    end.end.connect(server_address(pipes, int(server)))
    end.send(str(os.getpid()))
    if error := int(end.next() or 0):
        raise CUDAError(f"{ERRORS[error]}: the server takes no clients now")
    return Client(end, lose, on_fault)
