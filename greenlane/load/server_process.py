"""A server as a process of its own: started, found ready, looked at in /proc, and ended with its children.

It logs to a file, since no thread may read its log where latencies are measured, and is asked whether it is ready.
`greenlane.ray.server` starts its own, since it waits on the event loop of its replica.
"""

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

LOOK = 0.1
"""Seconds between looks at whether a server that logs to a file is ready."""
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessStatus(NamedTuple):
    """A process in /proc: its name, its state, its parent, and the seconds of CPU time it took so far."""

    pid: int
    name: str
    state: str
    parent: int
    cpu_seconds: float


@contextmanager
def logging_process(
    command: Sequence[str], log: Path, grace: float = 30.0, given: bytes = b""
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start a server that logs to this file, and stop it after the block; it is killed if it takes more than `grace` seconds.

    It reads `given` on its stdin.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    assert process.stdin
    try:
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(given)
        yield process
    finally:
        terminate(process, grace)


def becomes_ready(process: "subprocess.Popen[bytes]", ready: Callable[[], bool], patience: float) -> bool:
    """Look until this says so; False if the process ended before, or after `patience` seconds. Blocks."""
    end = monotonic() + patience
    while not ready():
        if process.poll() is not None or monotonic() > end:
            return False
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK)
    return True


def terminate(process: "subprocess.Popen[Any]", patience: float) -> None:
    """Have a process drain and end, and wait for that; it is killed after `patience` seconds."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def family_of(pid: int) -> list[ProcessStatus]:
    """This process, and those that it and its children and grandchildren started."""
    found, everyone = {pid}, list(processes())
    for _ in range(3):
        found |= {one.pid for one in everyone if one.parent in found}
    return [one for one in everyone if one.pid in found]


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes() -> Iterator[ProcessStatus]:
    """Every process of this machine."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                text = Path(f"/proc/{entry}/stat").read_text()
                fields = text.rpartition(")")[2].split()
                name = text[text.index("(") + 1 : text.rindex(")")]
                ticks = int(fields[11]) + int(fields[12])  # utime and stime: 14 and 15 in proc(5), 12 and 13 after the name
                yield ProcessStatus(int(entry), name, fields[0], int(fields[1]), ticks / _TICKS)
