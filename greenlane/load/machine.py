"""Which machine a figure comes from, and how much of it other programs used meanwhile: neither the tenants nor their clients.

Beside an aggressor that keeps its cores busy, other programs move to those of the victim, and what looks like a leak is theirs.
"""

import math
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import perf_counter

from greenlane.load.server_process import family_of
from greenlane.own import HOME

LIBRARIES = (
    "onnxruntime", "tensorrt-rtx-cu13-bindings", "tensorrt-cu13", "cuda-core", "cuda-bindings",
    "uvicorn", "uvloop", "httptools", "fastapi", "numpy",
)  # fmt: skip


def describe(command: str) -> dict[str, str]:
    """Facts of this machine, this program and today, by headings for people."""
    return {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{_processor()}, {os.cpu_count()} cores, of which {len(os.sched_getaffinity(0))} may be used",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "GPU": "; ".join(_said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv")[1:]) or "none",
        "system": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": ", ".join(_libraries()),
        "revision": _revision(),
    }


def load() -> dict[str, str]:
    """How busy the machine was before."""
    return {"load average": " ".join(f"{each:.1f}" for each in os.getloadavg())}


def command(module: str) -> str:
    """The command line of this process, as one would type it."""
    return " ".join(["python", "-m", module, *sys.argv[1:]])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _revision() -> str:
    """Of the checkout in which this program is. If it is installed, its version: a folder around it may be anyone's."""
    git = "git", "-C", str(HOME)
    ours = _said(*git, "rev-parse", "--show-toplevel") == [str(HOME)]
    return (
        " ".join(_said(*git, "describe", "--always", "--dirty")) if ours else ""
    ) or f"version {metadata.version('greenlane')}"


def _libraries() -> Iterator[str]:
    for name in LIBRARIES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def _said(*command: str) -> list[str]:
    """The lines that a program prints; none if it is not there or fails."""
    if not shutil.which(command[0]):
        return []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


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
