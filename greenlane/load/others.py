"""How much of the machine other programs used meanwhile: they are neither the tenants nor their clients.

They matter where cores are given to tenants: beside an aggressor that keeps its cores busy, other programs move to those of the
victim, and what looks like a leak is theirs.
"""

import math
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from greenlane.load.server_process import family_of

STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")


class Others:
    """Counts from its creation on; `share` is the part of these cores' time that other programs, or the host, used since then.

    `whole` is whether the server is one of this process's own: without that its time cannot be distinguished from theirs.
    """

    def __init__(self, cores: Sequence[int], whole: bool) -> None:
        self._cores = frozenset(cores)
        self._whole = whole
        self._began = perf_counter()
        self._before = self._counted()

    def share(self) -> float:
        """NaN where it cannot be known."""
        elapsed = (perf_counter() - self._began) * max(1, len(self._cores))
        busy, own = (now - then for now, then in zip(self._counted(), self._before, strict=True))
        return max(0.0, min(1.0, (busy - own) / elapsed)) if self._whole else math.nan

    def _counted(self) -> tuple[float, float]:
        """CPU seconds of these cores, and those of this process and all that it started."""
        if not self._whole:
            return 0.0, 0.0
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = sum(one.cpu_seconds for one in family_of(os.getpid())) + ended.ru_utime + ended.ru_stime
        return sum(busy(STAT.read_text(), self._cores)), own


def busy(stat: str, cores: frozenset[int]) -> list[float]:
    """The seconds in which each of these cores ran a program of this machine (user, nice, system) or of another (steal).

    Interrupts are left out: they are counted for no process, and are mostly those of the loads themselves.
    """
    found = []
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, steal = (int(fields[at]) if at < len(fields) else 0 for at in (0, 1, 2, 7))
            found.append((user + nice + system + steal) / _TICKS)
    return found
