"""Partitions of CPU cores: a granule is one core that this process may use, and a partition's threads have affinity to its
cores.

A partition's stream is a queue of functions that run in order, each on the first attached thread that waits for it. So an
inference crosses one thread boundary instead of two, and an idle partition needs no thread.
"""

import ctypes
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from .errors import DeviceUnavailable, PartitionError
from .plan import choose, ranges

T = TypeVar("T")


class CpuTask:
    """A function on a stream: whether it has run, and what it raised."""

    __slots__ = ("_function", "done", "error")

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self.done = False
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<CpuTask {'failed' if self.error else 'done' if self.done else 'waiting'}>"

    def run(self) -> None:
        """Call the function, once, and keep what it raises, interrupts included: the thread that waits for the task raises it.

        The function is released afterwards. It may refer to an object that refers to the task, and a cycle would keep both
        until the garbage collector runs.
        """
        function, self._function = self._function, _nothing
        try:
            function()
        except BaseException as error:
            self.error = error
        self.done = True


def _nothing() -> None:
    """The function of a task that has run, or that only marks a position in the queue."""


class CpuStream:
    """Functions that run one after another, in the order they were put."""

    def __init__(self, partition: "CpuPartition") -> None:
        self._partition = partition
        self._waiting: deque[CpuTask] = deque()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CpuStream of cores {ranges(self._partition.cores)}, {len(self._waiting)} waiting>"

    def put(self, function: Callable[[], None]) -> CpuTask:
        """Queue a function and return a task to `wait` for. Does not block; nothing runs yet."""
        task = CpuTask(function)
        self._waiting.append(task)
        return task

    def wait(self, task: CpuTask) -> None:
        """Run the tasks up to this one on the calling thread, or wait until another thread has; raise what this one raised.

        If the calling thread is not attached to the partition, they run on a new thread that is.
        """
        if not task.done:
            if self._partition.attached:
                self._run_until(task)
            else:
                self._partition.run(lambda: self._run_until(task))
        if task.error:
            raise task.error

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._waiting and not self._lock.locked()

    def drain(self) -> None:
        """Run everything that was put so far; errors are raised by the tasks' own `wait`. Blocks."""
        if not self.idle:
            self.wait(self.put(_nothing))

    def _run_until(self, last: CpuTask) -> None:
        with self._lock:
            while not last.done:
                self._waiting.popleft().run()


class CpuPartition:
    """Cores reserved for one holder; see `partitions.base.Partition` for the contract."""

    def __init__(self, granules: Sequence[int], cores: Sequence[int], attached: threading.local) -> None:
        self.granules = tuple(granules)
        self.cores = tuple(cores)
        self.stream = CpuStream(self)
        self._attached = attached
        self._closed = False

    def __repr__(self) -> str:
        return f"<CpuPartition cores {ranges(self.cores)}{', closed' if self._closed else ''}>"

    @property
    def size(self) -> int:
        return len(self.cores)

    @property
    def host_cores(self) -> frozenset[int] | None:
        return frozenset(self.cores)

    @property
    def attached(self) -> bool:
        """Whether the calling thread is attached to this partition."""
        return getattr(self._attached, "partition", None) is self

    @property
    def idle(self) -> bool:
        return self.stream.idle

    def attach(self) -> None:
        if self._closed:
            raise PartitionError(f"{self!r} cannot take another thread")
        os.sched_setaffinity(0, self.cores)
        self._attached.partition = self

    def run(self, function: Callable[[], T]) -> T:
        result: Future[T] = Future()

        def body() -> None:
            try:
                self.attach()
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        thread = threading.Thread(target=body, name=f"cores {ranges(self.cores)}")
        thread.start()
        thread.join()
        return result.result()

    def locate(self) -> frozenset[int]:
        """The cores that the kernel allows an attached thread, and the one it ran on."""
        getcpu = ctypes.CDLL(None).sched_getcpu
        return self.run(lambda: frozenset({*os.sched_getaffinity(0), getcpu()}))

    def close(self) -> None:
        if not self._closed:
            self.stream.drain()
            self._closed = True


class CpuDevice:
    """The cores this process may use, each a granule."""

    kind = "cpu"
    unit = "core"

    def __init__(self, cores: Sequence[int]) -> None:
        self.cores = tuple(cores)
        self._attached = threading.local()

    def __repr__(self) -> str:
        return f"<CpuDevice cores {ranges(self.cores)}>"

    @property
    def granules(self) -> tuple[int, ...]:
        return (1,) * len(self.cores)

    def describe(self) -> str:
        count = len(self.cores)
        return f"CPU, {count} core{'s' * (count != 1)} ({ranges(self.cores)}), one a granule"

    def carve(self, granules: Sequence[int]) -> CpuPartition:
        chosen = choose(granules, len(self.cores))
        return CpuPartition(chosen, [self.cores[granule] for granule in chosen], self._attached)

    def pin(self, address: int, nbytes: int) -> "CpuDevice":
        """Do nothing, and return something to close: cores reach all memory."""
        return self

    def close(self) -> None:
        """Do nothing: the cores are not released."""


def open_cpu(cores: Iterable[int] | None = None, root: Path = Path("/")) -> CpuDevice:
    """Open these cores, or all that this process's affinity and its cgroup's CPU quota allow.

    `root` is where /proc and /sys are. Raises DeviceUnavailable for a core the process may not use, and for no core at all.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if cores is None:
        return CpuDevice(allowed[: _quota(root, len(allowed))])
    chosen = sorted(set(cores))
    if missing := sorted(set(chosen) - set(allowed)):
        raise DeviceUnavailable(f"cores {ranges(missing)} are not among those this process may use: {ranges(allowed)}")
    if not chosen:
        raise DeviceUnavailable(f"no core was named; this process may use {ranges(allowed)}")
    return CpuDevice(chosen)


def _quota(root: Path, most: int) -> int:
    """The CPU quota of this process in cores, from its tightest cgroup, rounded down, at least 1.

    Format: cgroup v2 `cpu.max` is "QUOTA PERIOD" or "max PERIOD"; v1 has `cpu.cfs_quota_us` (-1: none) and `cpu.cfs_period_us`
    (https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files).
    """
    quotas = [quota for group in _groups(root) for quota in _read_quota(group)]
    return max(1, min([most, *map(math.floor, quotas)]))


def _groups(root: Path) -> Iterable[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        if not controllers or "cpu" in controllers.split(","):
            group = base / path.lstrip("/")
            yield from (parent for parent in (group, *group.parents) if parent.is_relative_to(base))


def _read_quota(group: Path) -> Iterable[float]:
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text()
    except OSError:
        return
    if quota not in ("max", "-1"):
        yield int(quota) / int(period)
