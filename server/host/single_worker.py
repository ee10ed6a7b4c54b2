"""One process owns the device: notice a second worker of the same supervisor, as under `uvicorn --workers 2`.

What may not be shared is not the device, which two servers may well divide between them, but one supervisor: workers of the
same one take connections from the same socket, and each would carve the same granules for the same tenants. So the one
worker of a supervisor holds a name made of the supervisor's process id, which the kernel frees however the worker ends. A
worker that is started in the place of another, as `--reload` does, finds it free.
"""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process


class AnotherWorker(Exception):
    """Another worker of the same supervisor serves already."""


def supervisor() -> int | None:
    """The process id of what started this process as a worker of its own; None for one that was started by itself."""
    parent = parent_process()
    return parent.pid if parent else None


@contextmanager
def alone(supervisor: int | None) -> Iterator[None]:
    """Be the only worker of this supervisor meanwhile; without one there is nothing to be. Raises AnotherWorker."""
    if supervisor is None:
        yield
        return
    with socket.socket(socket.AF_UNIX) as place:
        try:
            place.bind(f"\0greenlane-worker-of-{supervisor}")  # A name of Linux's own, without a file behind it.
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise AnotherWorker(
                "another worker of the same uvicorn serves already, and every worker would carve the same device; "
                "start one: without --workers, and without WEB_CONCURRENCY in the environment"
            ) from None
        yield
