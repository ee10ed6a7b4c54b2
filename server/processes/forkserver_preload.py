"""Loaded by the forkserver that all other processes are forked from, so that the modules are loaded, and in memory, once.

Importing this changes signal handling and garbage collection of the importing process: only the forkserver may.
"""

import atexit
import gc
import os
import signal
import sys
import warnings

from engines import preload
from partitions import has_driver

from ..api import docs
from ..host import orphans
from .dispatching import dispatcher
from .http_side import http_process

TARGETS = (dispatcher.main, http_process.main)

if has_driver():
    preload()
docs.document()  # So that no process computes it while it serves.

# SIGTERM to the whole process group is for the supervisor, which then ends this one.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
# What a process that ends has started, such as workers of a model's functions, is ended too: by the supervisor, or where that
# has ended before, by this process at its end. multiprocessing waits for all children, and warns of those that it did not fork.
orphans.adopt()


def end_below() -> None:
    """End what is below, unless it is this process that has failed, as where there is no memory to fork: then others go on."""
    if not hasattr(sys, "last_value"):
        orphans.end_below(os.getpid())


warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid", UserWarning)
# The collectors of forked processes must not touch what exists by now: each page they write to would be copied.
gc.collect()
gc.freeze()
# It has nothing to save at its end, and frees nothing of the libraries that it loaded; see `server.host.leaving`.
atexit.register(os._exit, 0)
atexit.register(end_below)  # Before the other, as the last that is registered is the first to run.
