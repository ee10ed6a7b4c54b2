"""What the full TensorRT has timed of kernels on a GPU, kept in a file from one build to the next.

A later build takes from there what it would time otherwise. The library ignores what another version or another kind of GPU has
timed.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...model_files.cache_folder import replace_file

log = logging.getLogger("greenlane.engines")


@contextmanager
def kept_timings(config: Any, path: Path) -> Iterator[None]:
    """A build in the block, with this configuration, uses the timings in the file and adds its own. Blocks to read and write.

    What other builds have added meanwhile stays. A file that cannot be read or written is logged, and costs time only.
    """
    known = b""
    try:
        known = _read(path)
    except OSError as error:
        log.warning("kernels are timed again: %s: %s", path, error.strerror)
    config.set_timing_cache(config.create_timing_cache(known), False)
    yield
    try:
        _add(config, path)
    except OSError as error:
        log.warning("timings of kernels are not kept for the next build: %s: %s", path, error.strerror)


def _add(config: Any, path: Path) -> None:
    from filelock import FileLock  # Only installed where TensorRT is.

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        cache = config.get_timing_cache()
        cache.combine(config.create_timing_cache(_read(path)), False)
        replace_file(path, bytes(memoryview(cache.serialize())))


def _read(path: Path) -> bytes:
    """What is in the file; nothing if it is missing. Raises OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
