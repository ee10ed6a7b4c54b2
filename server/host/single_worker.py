"""Refuses to serve in a second worker of the same parent, as under `uvicorn --workers 2`.

Two servers may share a device. Workers of one parent may not: they accept from the same socket, and each would carve the same
granules for the same tenants. So a worker holds an abstract Unix socket named after its parent's process id, which the kernel
frees however the worker ends. A worker that replaces another one, as with `--reload`, finds the name free.
"""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process


class AnotherWorker(Exception):
    """Another worker of the same parent serves already."""


def worker_parent() -> int | None:
    """The process id of the parent that started this process as one of its workers; None if it is no worker."""
    parent = parent_process()
    return parent.pid if parent else None


@contextmanager
def only_worker(parent: int | None) -> Iterator[None]:
    """Hold the name of this parent's only worker; with None do nothing. Raises AnotherWorker if another one holds it."""
    if parent is None:
        yield
        return
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0greenlane-worker-of-{parent}")  # An abstract name of Linux, without a file.
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise AnotherWorker(
                "another worker of the same uvicorn serves already, and every worker would carve the same device; "
                "start one: without --workers, and without WEB_CONCURRENCY in the environment"
            ) from None
        yield
