"""`python -m engines.tensorrt.building.child`: one build, or kernels compiled, for the process that started this one.

See `builds`, beside this.
The order comes on standard input, what becomes of it goes to standard output, a line of JSON each. Whatever a library
prints goes to standard error.
"""

import ctypes
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

from partitions import PartitionError

from ...errors import EngineError
from ..api import TensorRT, find_tensorrt
from .builder import Wanted, build, kept
from .builds import encode
from .kernels import Kernels, compile_kernels
from .progress import Progress, Step

log = logging.getLogger("greenlane.engines")

_PR_SET_PDEATHSIG = 1
"""Of <linux/prctl.h>: a signal for when the thread ends that started this process."""
_NICE = 19
_EVERY = 1.0
"""Seconds between two messages about one per cent."""

Say = Callable[[bytes], None]


def main() -> int:
    """Do what the order says and return the exit status, 0 where it was answered."""
    order = pickle.load(sys.stdin.buffer)
    end_with(order.parent)
    say = take_over_output()
    logging.getLogger("greenlane").addHandler(Relay(say))
    logging.getLogger("greenlane").setLevel(logging.INFO)
    give_way(order.cores)
    if isinstance(order.want, Kernels):
        return answer_kernels(order.want, order.gpu, say)
    return answer(order.want, order.gpu, say)


def end_with(parent: int) -> None:
    """Be killed when the process that started this one ends, however it does, or now if it already has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def take_over_output() -> Say:
    """Keep standard output for messages, and send there what is printed to standard error instead."""
    messages, speaking = os.dup(1), Lock()  # The library's threads log too.
    os.dup2(2, 1)

    def say(message: bytes) -> None:
        with speaking:
            while message:
                message = message[os.write(messages, message) :]

    return say


def give_way(cores: frozenset[int]) -> None:
    """Run on these cores, if any are named, after everybody else."""
    with suppress(OSError):
        os.nice(_NICE)
    if cores:
        with suppress(OSError):  # They may have been taken from this process meanwhile: it is nicer than others anyway.
            os.sched_setaffinity(0, cores)


def idle() -> None:
    """Take processor time, and the disk's, only where there is some over: SCHED_IDLE implies the idle class of both.

    Threads that are started from now on inherit it.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def answer_kernels(want: Kernels, gpu: int, say: Say) -> int:
    """Compile the kernels, and say that they are kept or why not.

    This thread is only nicer than others (`give_way`) and does not take idle time alone: it holds locks of the GPU's driver.
    """
    say(encode("begun", process=os.getpid()))
    try:
        compile_kernels(want, gpu)
    except (EngineError, PartitionError) as error:
        say(encode("refused", text=f"{want.plan_path}: its kernels were not compiled: {error}"))
    except Exception as error:
        log.exception("the compilation failed")
        say(encode("refused", text=f"{want.plan_path}: its kernels were not compiled: {error!r}"))
    else:
        say(encode("built", path=str(want.plan_path), anew=True))
    return 0


def answer(want: Wanted, gpu: int | None, say: Say) -> int:
    """Find or build the plan, and say where it is or why there is none."""
    anew = False

    def make(onnx: bytes) -> bytes:
        nonlocal anew
        anew = True
        idle()
        say(encode("begun", process=os.getpid()))
        return build(onnx, want.options, _report(say), api=_library(want, gpu), path=want.onnx_path)

    try:
        path = kept(want, make)
    except EngineError as error:
        say(encode("refused", text=str(error)))
    except Exception as error:
        log.exception("the builder failed")
        say(encode("refused", text=f"{want.onnx_path}: its builder failed: {error!r}"))
    else:
        say(encode("built", path=str(path), anew=anew))
    return 0


def _library(want: Wanted, gpu: int | None) -> TensorRT:
    """The library that the order names, with the GPU that it measures on current in this thread, if it does."""
    if gpu is not None:
        from cuda.core import Device  # Only libraries that measure need a GPU, and then this package.

        Device(gpu).set_current()
    api = find_tensorrt([want.library])
    if api.version != want.version:
        raise EngineError(f"{want.onnx_path}: {api} builds it, but {want.version} would load it; restart the server")
    return api


def _report(say: Say) -> Progress:
    """Tell every per cent, and every second."""
    last = (-1, 0.0)

    def report(step: Step) -> bool:
        nonlocal last
        per_cent, now = int(step.share * 100), time.monotonic()
        if per_cent > last[0] or now - last[1] >= _EVERY:
            last = per_cent, now
            say(encode("step", phase=step.phase, share=step.share))
        return True

    return report


class Relay(logging.Handler):
    """Hands what is logged here to the process that serves, whose log it belongs into."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(encode("log", level=record.levelno, text=self.format(record)))


if __name__ == "__main__":
    sys.exit(main())
