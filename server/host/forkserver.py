"""The forkserver, from which a server forks its processes: started before this process imports the server itself.

Both import the same modules, which takes each a second or more, and do so at the same time then.
"""

import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from threading import current_thread, main_thread

from .signals import blocked_in_children


def context() -> ForkServerContext:
    """What starts processes from the forkserver."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["server.__main__", "server.processes.forkserver_preload"])
    return found


def start() -> None:
    """Start the forkserver, if there is none. Blocks, but does not wait until it has loaded its modules."""
    context()
    resource_tracker.ensure_running()  # Its start unblocks both signals, and the forkserver would start it otherwise.
    with blocked_in_children():
        forkserver.ensure_running()


def start_early(config: str | None) -> None:
    """The same before it is known what is served; not for a configuration file that may ask for one process alone.

    SIGHUP is ignored meanwhile, and so in all processes that are forked: they end with this one, not with the terminal.
    """
    path = config or os.environ.get("GREENLANE_CONFIG")
    with suppress(OSError):  # Whoever reads it next says what is wrong.
        if path and b"inline" in Path(path).read_bytes():
            return
    if current_thread() is not main_thread():
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        start()
    finally:
        signal.signal(signal.SIGHUP, before)
