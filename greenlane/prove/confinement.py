"""Where work really ran: the server's probe of every partition, and the threads of a model's own work on CPU cores.

The probe runs a little work of its own in each partition. A model's work is seen from outside: all tenants are driven at the
same time, which is when a thread that may leave its cores would, and the kernel says on which core each thread ran
(/proc/PID/task/TID/stat, field 39) and where it may (sched_getaffinity). On a GPU an engine's SMs cannot be seen from outside.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from greenlane.load.rules import Word

from .access import Access

PROC = Path("/proc")
LOOK = 0.004
"""Seconds between two looks at every thread."""
LEAST_TICKS = 2
"""Clock ticks of CPU time from which a thread counts as one that worked."""


@dataclass(frozen=True, slots=True)
class Located:
    """A tenant: the units of its partition that the probe ran on, and the cores that its own work ran on.

    `own` is empty where that was not seen; `why` says why the word is what it is.
    """

    tenant: str
    unit: str
    units: tuple[int, ...]
    word: Word
    why: str
    own: tuple[int, ...] = ()
    own_word: Word = "not exercised"
    own_why: str = ""


class Sample(NamedTuple):
    """A thread at one moment: the core that it ran on last, and its CPU time in clock ticks."""

    core: int
    ticks: int


@dataclass(slots=True)
class Seen:
    """A thread over time: its CPU time in all, and while it was seen to work; the cores that it ran on then, and might run on.

    What it does only where no other thread would run (SCHED_IDLE), as threads on lent cores do, does not count.
    """

    last: int
    worked: int = 0
    cores: set[int] = field(default_factory=set)
    allowed: frozenset[int] = frozenset()
    idle: bool = False


class Watch:
    """Looks at the threads of some processes, on a thread of its own, from `start` to `stop`."""

    def __init__(self, pids: Mapping[str, frozenset[int]]) -> None:
        self._pids = pids
        self._threads: dict[str, dict[tuple[int, int], Seen]] = {name: {} for name in pids}
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="watch of threads", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> dict[str, dict[tuple[int, int], Seen]]:
        """End; the threads by tenant, and by process and thread."""
        self._stopped.set()
        self._thread.join()
        return self._threads

    def _run(self) -> None:
        while not self._stopped.wait(LOOK):
            for name, pids in self._pids.items():
                for pid in pids:
                    self._look(pid, self._threads[name])

    def _look(self, pid: int, threads: dict[tuple[int, int], Seen]) -> None:
        with suppress(OSError):  # The process, or a thread, has ended.
            for entry in os.listdir(PROC / str(pid) / "task"):
                tid = int(entry)
                now = parsed((PROC / str(pid) / "task" / entry / "stat").read_text())
                seen = threads.setdefault((pid, tid), Seen(now.ticks))
                if now.ticks > seen.last and os.sched_getscheduler(tid) != os.SCHED_IDLE:
                    seen.worked += now.ticks - seen.last
                    seen.cores.add(now.core)
                    seen.allowed = frozenset(os.sched_getaffinity(tid))
                seen.last = now.ticks


def parsed(stat: str) -> Sample:
    """Fields 39 (processor), 14 and 15 (utime and stime) of proc(5); the name before them may hold any character."""
    fields = stat.rpartition(")")[2].split()
    return Sample(int(fields[36]), int(fields[11]) + int(fields[12]))


def probe(access: Access) -> list[Located]:
    """Where the server says that work in each partition ran. Raises ServerEnded, CannotProve."""
    found = access.administer("POST", "/admin/partitions/probe")
    unit = {each["name"]: each["unit"] for each in found["devices"]}
    shared: dict[str, list[str]] = {}
    for overlap in found["overlaps"]:
        one, other = overlap["tenants"]
        units = ", ".join(map(str, overlap["units"]))
        what = f"it shares {units} with" if units else "it did not have all of its units at the same time as"
        shared.setdefault(one, []).append(f"{what} {other}")
        shared.setdefault(other, []).append(f"{what} {one}")
    return [
        _located(name, unit.get(each["device"], "core"), each["located"] or (), each["size"], shared.get(name, []))
        for name, each in found["partitions"].items()
    ]


def _located(name: str, unit: str, units: Sequence[int], size: int, shared: Sequence[str]) -> Located:
    word: Word = "isolated"
    why = f"it ran on {len(units)} of its {size} {unit}{'s' * (size != 1)}, and on none of another tenant's"
    if not units:
        why = f"work of the probe took all of its {size} {unit}s at the same time as each other tenant's took theirs"
    if len(units) > size:
        word, why = "leaks", f"it ran on {len(units)} {unit}s, and was granted {size}"
    if shared:
        word, why = "leaks", "; ".join(shared)
    return Located(name, unit, tuple(units), word, why)


def judged(located: Located, threads: Mapping[tuple[int, int], Seen], others: Mapping[int, str]) -> Located:
    """The same with where this tenant's own work ran; `others` are the tenants that other cores belong to.

    The main thread of a process is HTTP's, which may have cores of its own (`front_cores`); where nothing else worked, it ran
    the models too. Threads on lent cores do not count: they are there by configuration.
    """
    if located.unit != "core":
        return unseen(located, "an engine's own work on a GPU cannot be seen from outside of it; the probe's can")
    worked = {key: seen for key, seen in threads.items() if seen.worked >= LEAST_TICKS}
    models = {key: seen for key, seen in worked.items() if key[0] != key[1]} or worked
    if not models:
        return unseen(located, "no thread of the tenant's process was seen to work")
    cores = sorted({core for seen in models.values() for core in seen.cores})
    free = sorted({core for seen in models.values() for core in seen.allowed} - set(located.units))
    outside = [core for core in cores if core not in located.units]
    if outside:
        whose = ", ".join(f"{core} ({others.get(core, 'of no tenant')})" for core in outside)
        return _with(located, cores, "leaks", f"threads of its models ran on core {whose}")
    if free:
        whose = ", ".join(f"{core} ({others.get(core, 'of no tenant')})" for core in free)
        return _with(located, cores, "leaks", f"threads of its models stayed on its cores, but may run on core {whose}")
    count = f"{len(models)} thread{'s' * (len(models) != 1)}"
    return _with(located, cores, "isolated", f"{count} of its models worked, on its cores, and may run on no other")


def unseen(located: Located, why: str) -> Located:
    """The same where the tenant's own work cannot be seen."""
    return _with(located, (), "not exercised", why)


def _with(located: Located, cores: Sequence[int], word: Word, why: str) -> Located:
    units = located.units
    return Located(located.tenant, located.unit, units, located.word, located.why, tuple(cores), word, why)


def processes_of(port: int, own_port: int) -> frozenset[int]:
    """The processes of this machine that hold the server's end of a connection from `own_port`; those that may be looked at."""
    inode = _inode(port, own_port)
    if inode is None:
        return frozenset()
    return frozenset(int(entry) for entry in os.listdir(PROC) if entry.isdigit() and _holds(entry, f"socket:[{inode}]"))


def _holds(process: str, what: str) -> bool:
    """Whether one of its descriptors is that; False for a process that may not be looked at."""
    folder = PROC / process / "fd"
    with suppress(OSError):
        for entry in os.listdir(folder):
            with suppress(OSError):  # Closed meanwhile.
                if os.readlink(folder / entry) == what:
                    return True
    return False


def _inode(port: int, own_port: int) -> str | None:
    """The inode of the socket whose local port is the server's and whose remote port is the client's."""
    for table in ("net/tcp", "net/tcp6"):
        with suppress(OSError):
            for line in (PROC / table).read_text().splitlines()[1:]:
                fields = line.split()
                ends = [int(fields[at].rpartition(":")[2], 16) for at in (1, 2)]
                if ends == [port, own_port]:
                    return fields[9]
    return None
