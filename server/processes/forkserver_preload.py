"""Loaded by the forkserver that all other processes are forked from, so that the modules are loaded, and in memory, once.

Importing this changes signal handling and garbage collection of the importing process: only the forkserver may.
"""

import atexit
import gc
import os
import signal

from ..api import docs
from .dispatching import dispatcher
from .http_side import http_process

TARGETS = (dispatcher.main, http_process.main)

docs.document()  # So that no process computes it while it serves.

# SIGTERM to the whole process group is for the supervisor, which then ends this one.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
# The collectors of forked processes must not touch what exists by now: each page they write to would be copied.
gc.collect()
gc.freeze()
# It has nothing to save at its end, and frees nothing of the libraries that it loaded; see `server.host.leaving`.
atexit.register(os._exit, 0)
