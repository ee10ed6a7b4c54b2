"""Which machine a figure comes from: without that, it says nothing."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

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
        "revision": " ".join(_said("git", "describe", "--always", "--dirty")) or "unknown",
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
