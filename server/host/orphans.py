"""Ends what processes leave behind that they have started themselves, such as workers of a model's functions.

The forkserver adopts them: whatever a process below it has started is below it too once that process has ended.
"""

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_SET_CHILD_SUBREAPER = 36
_PATIENCE = 2.0
"""Seconds for which processes that start others all the time are killed again and again."""
_PAUSE = 0.005
_ENDED = "ZX"


def adopt() -> None:
    """Become the parent of every process below this one whose own parent ends. The caller has to wait for them."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(parent: int, apart_from: Collection[int] = ()) -> list[int]:
    """The processes that this one has started, and those that these have, and so on, without those that have ended.

    `apart_from` are left out, with what is below them. Looks at every process of the machine.
    """
    children: dict[int, list[int]] = {}
    ended = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # It is gone by now.
            state, its_parent, *_ = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(its_parent), []).append(int(name))
            if state in _ENDED:
                ended.add(int(name))
    found: list[int] = []
    look_at = [parent]
    while look_at:
        under = [each for each in children.get(look_at.pop(), ()) if each not in apart_from]
        found += under
        look_at += under
    return [each for each in found if each not in ended]


def end_below(parent: int, apart_from: Collection[int] = ()) -> int:
    """Kill these, and return how many there were. Blocks until they have ended, for some seconds at most."""
    killed: set[int] = set()
    until = time.monotonic() + _PATIENCE
    while (found := below(parent, apart_from)) and time.monotonic() < until:
        for each in found:
            with suppress(OSError):
                os.kill(each, signal.SIGKILL)
        killed.update(found)
        time.sleep(_PAUSE)
    return len(killed)
