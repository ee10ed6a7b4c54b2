"""Releases the objects of a failed library call with the call itself, instead of leaving them to the garbage collector.

Problem: an exception's traceback refers to every frame it passed through, and these to their local variables, TensorRT
objects included. If the exception becomes part of a reference cycle, only the garbage collector frees them, and it may
run at any allocation.

Hazard: it may run in the middle of a TensorRT call. TensorRT logs through Python while it holds an internal mutex; the
log call may start a collection, and freeing a TensorRT object takes the same mutex. The thread then waits for itself and
the process hangs (seen with TensorRT-RTX 1.6.1 at `createInferBuilder`).

Solution: when an exception leaves a function that uses the library, clear the local variables of the frames it went through.
Frames that are still running are skipped; they release their objects when they return.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames


@contextmanager
def releasing() -> Iterator[None]:
    """Decorates a function that uses TensorRT: an exception that leaves it keeps none of the function's objects alive."""
    try:
        yield
    except BaseException as error:
        _clear(error, set())
        raise


def _clear(error: BaseException | None, seen: set[int]) -> None:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    clear_frames(error.__traceback__)
    _clear(error.__cause__, seen)
    _clear(error.__context__, seen)
