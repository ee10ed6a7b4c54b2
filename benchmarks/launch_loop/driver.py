"""The HTTP side of a link: a process of its own, in which C puts tickets and takes completions.

Its commands come as lines of JSON on stdin, and each is answered with one on stdout.
"""

import ctypes
import json
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np

from server.launch_loop.structures import address, view_link
from server.link import ring
from server.link.encoding import decode_outcome
from server.link.ring import Descriptors

from .native import Job, open_driver_library, percentiles

MOST_LATENCIES = 2_000_000
_PAGE = 8192
_HEAD = 20


class Load(NamedTuple):
    """What a driver does in one phase.

    Slot n has the `capacity` bytes from n * capacity on. With a `rate` it puts so many tickets a second, whatever was
    answered, in `outstanding` slots; without, `outstanding` at first, and then one for each completion. `seconds` is the
    phase's length.
    """

    body: bytes
    capacity: int
    outstanding: int
    seconds: float
    rate: float = 0.0


class Outcome(NamedTuple):
    """What came of a phase: completions, of which `counted` came in time; latencies in microseconds; the slots that were used.

    `flaw` is empty, or what was wrong.
    """

    taken: int
    counted: int
    p50: float
    p99: float
    p999: float
    most: float
    slots: list[int]
    flaw: str


class Driver:
    """A driver process of a link. Close it to end it."""

    def __init__(self, descriptors: Descriptors) -> None:
        command = [sys.executable, "-m", "benchmarks.launch_loop.driver", json.dumps(descriptors)]
        files = descriptors[:4]
        self._process = subprocess.Popen(command, pass_fds=files, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._receive()

    def run(self, load: Load) -> Outcome:
        """A whole phase. Blocks. Raises RuntimeError if the process has ended."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(load._replace(body=load.body.hex())).encode() + b"\n")  # type: ignore[arg-type]
        self._process.stdin.flush()
        return Outcome(*self._receive())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _receive(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the driver process ended with status {self._process.wait()}; its error is above")
        return json.loads(line)


class _Phases:
    """In the driver process: runs phases one after the other."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._library = open_driver_library()
        self._link = ring.attach(descriptors)
        count = descriptors.slots
        self._latencies = np.zeros(MOST_LATENCIES, np.int64)
        self._due = np.zeros(count, np.int64)
        self._idle = np.zeros(count, np.uint32)
        self._first = np.zeros(_PAGE, np.uint8)
        self._job = Job(
            link=view_link(self._link),
            latencies=address(self._latencies.data),
            most=MOST_LATENCIES,
            first=address(self._first.data),
            due=address(self._due.data),
        )

    def run(self, load: Load) -> Outcome:
        job = self._job
        self._due[:] = 0
        job.body, job.length, job.outstanding, job.capacity = load.body, len(load.body), load.outstanding, load.capacity
        job.rate, job.duration = load.rate, int(load.seconds * 1e9)
        self._library.drive(ctypes.byref(job), ctypes.c_void_p(address(self._idle.data)))
        latencies = self._latencies[: min(job.counted, MOST_LATENCIES)]
        used = [int(slot) for slot in np.flatnonzero(self._due)]
        p50, p99, p999, most = percentiles(latencies)
        return Outcome(job.taken, job.counted, p50, p99, p999, most, used, self._flaw())

    def _flaw(self) -> str:
        job = self._job
        if job.lost:
            return f"no completion came for a long time, after {job.taken}"
        if job.differing:
            return f"{job.differing} of {job.taken} completions were not like the first"
        if job.taken:
            length = int(self._first[_HEAD - 4 : _HEAD].view(np.uint32)[0])
            _, failure, _ = decode_outcome(self._first[_HEAD : _HEAD + length].tobytes())
            return f"failed: {failure}" if failure else ""
        return "no ticket was sent"


def main() -> int:
    """Answer commands until stdin ends."""
    phases = _Phases(Descriptors(*json.loads(sys.argv[1])))
    print("[]", flush=True)
    for line in sys.stdin:
        body, *rest = json.loads(line)
        print(json.dumps(phases.run(Load(bytes.fromhex(body), *rest))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
