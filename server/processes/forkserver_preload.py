"""What the process that all others are forked off loads, so that it is loaded, and lies in memory, once.

Importing this changes the process that does: no other may.
"""

import gc
import signal

from ..api import docs
from . import dispatcher, http_process

TARGETS = (dispatcher.main, http_process.main)

docs.document()  # So that no process computes it while it serves.

# A signal to the whole group means the main process, which then ends this one.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
# Nothing that is there by now is looked through, and so copied, by a collector of the processes to come.
gc.collect()
gc.freeze()
