"""A copy of a model file in memory, so that what is inspected is what is loaded, even if the file changes.

Problem: ONNX Runtime holds the GIL while it parses a model that is passed as bytes (49 ms for 60 MB), and every tenant's
worker waits. Given a path, it reads the file without the GIL. Solution: a sealed memory file, which has a path.
"""

import fcntl
import mmap
import os
import weakref
from pathlib import Path

from partitions.regular_file import open_regular

from ..model_files.onnx_file import MOST_BYTES

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_PART = 1 << 26
"""Bytes to copy in one system call."""


class ModelCopy:
    """A copy in memory that cannot be changed any more; `path` names it in this process until `close`."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.path = f"/proc/self/fd/{descriptor}"
        self.nbytes = nbytes
        self._descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    def view(self) -> memoryview:
        """The bytes, read-only and not copied."""
        return memoryview(mmap.mmap(self._descriptor, self.nbytes, prot=mmap.PROT_READ) if self.nbytes else b"")

    def close(self) -> None:
        """Free the memory, once the views of it are gone. Calling it again does nothing."""
        self._closing()


def copy_model(path: Path) -> ModelCopy:
    """Copy a file, without the GIL. Blocks. Raises OSError, also for what is too large for a model."""
    with open_regular(path, MOST_BYTES) as file:
        descriptor = os.memfd_create("greenlane model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            nbytes = 0
            while copied := os.sendfile(descriptor, file.fileno(), nbytes, _PART):
                nbytes += copied
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
    return ModelCopy(descriptor, nbytes)
