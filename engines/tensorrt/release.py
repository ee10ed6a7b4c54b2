"""Frees a library's objects with the call that failed, instead of leaving them to the garbage collector.

An error holds every frame it went through, and with them what their variables hold. Whoever keeps it in a cycle leaves
all that to the collector, which may run in the middle of a call of the library, when Python hears what the library logs.
TensorRT logs while it holds a lock, and wants the same lock to free an object: the process would wait for itself for ever
(seen with TensorRT-RTX 1.6.1 at `createInferBuilder`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames


@contextmanager
def releasing() -> Iterator[None]:
    """To decorate what uses a library: the frames that an error leaves behind hold nothing any more."""
    try:
        yield
    except BaseException as error:
        _clear(error, set())
        raise


def _clear(error: BaseException | None, seen: set[int]) -> None:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    clear_frames(error.__traceback__)  # But those that still run.
    _clear(error.__cause__, seen)
    _clear(error.__context__, seen)
