"""`python -m greenlane.load.process`: one load process. A pickled job comes on stdin, then the start; the result on stdout.

It imports nothing that it does not need, as dozens are started in an experiment.
"""

import ctypes
import gc
import os
import pickle
import signal
import sys

from .closedloop import Load, closed_loop
from .jobs import ClosedLoop, InTurn, OpenLoop, Tally
from .openloop import Generator

_PR_SET_TIMERSLACK = 29


def _urgent() -> None:
    """Before all else on its core, where that is allowed: a real client is on another machine."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return


class _Turns:
    """Closed loops one after another."""

    def __init__(self, job: InTurn) -> None:
        self._loops = [closed_loop(each) for each in job.jobs]

    def run(self, start: float) -> list[Tally]:
        return [loop.run(start) for loop in self._loops]


def _loop(job: OpenLoop | ClosedLoop | InTurn) -> Generator | Load | _Turns:
    if isinstance(job, OpenLoop):
        return Generator(job)
    return _Turns(job) if isinstance(job, InTurn) else closed_loop(job)


def main() -> None:
    """Do one job."""
    job = pickle.load(sys.stdin.buffer)
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # Sleep to the nanosecond and not to the next 50 us.
    if isinstance(job, OpenLoop) and not job.spin:
        _urgent()
    loop = _loop(job)
    if isinstance(loop, Generator):
        signal.signal(signal.SIGUSR1, lambda *_: loop.stop())
        try:
            loop.open()
        except RuntimeError as error:
            sys.exit(str(error))
    gc.freeze()
    gc.disable()
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    pickle.dump(loop.run(float(sys.stdin.buffer.readline())), sys.stdout.buffer)


if __name__ == "__main__":
    main()
