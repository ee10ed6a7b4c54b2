"""`python -m benchmarks.stalling [--virtual]`: the server, except that SIGUSR2 has a thread keep the interpreter.

What holds up every tenant when something changes, on demand: for tests that have to see it. With `--virtual` it is the
server of benchmarks.virtualcores.
"""

import ctypes
import signal
import sys
from threading import Thread

from server.__main__ import main

from . import virtualcores

STALL = 0.06
"""Seconds."""


def stall() -> None:
    """Keep the interpreter: unlike `ctypes.CDLL`, `PyDLL` calls without letting go of it."""
    ctypes.PyDLL(None).usleep(int(STALL * 1e6))


def serve() -> int:
    """Serve as the command line says."""
    signal.signal(signal.SIGUSR2, lambda *_: Thread(target=stall, name="stalling", daemon=True).start())
    if "--virtual" in sys.argv:
        sys.argv.remove("--virtual")
        return virtualcores.main()
    return main()


if __name__ == "__main__":
    sys.exit(serve())
