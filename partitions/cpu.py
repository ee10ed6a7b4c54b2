"""Partitions of CPU cores: a granule is one core that this process may use, and a partition's threads have affinity to its
cores.

A wide partition also has cores that other holders lend. Its attached threads run on the home cores only; helper threads, such
as those of a library's pool, run on the lent ones with the policy SCHED_IDLE, so a thread of the lender that wakes there takes
the core at once. The kernel may then move them to a home core, where they run while nothing else does. A thread that does
other things never gets that policy: without privileges it could not leave it (sched(7)).

A partition's stream is a queue of tasks that run in order, each on the first attached thread that waits for it. So an
inference crosses one thread boundary instead of two, and an idle partition needs no thread.
"""

import ctypes
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from .base import Held, UnpacedLoads
from .deposit import Deposit
from .errors import DeviceUnavailable, PartitionError
from .health import groups
from .plan import choose, choose_lent, ranges
from .strain import Before, Strain, Strained, unheld

T = TypeVar("T")

log = logging.getLogger("greenlane.partitions")

_SET_NAME = 15  # PR_SET_NAME (include/uapi/linux/prctl.h)
_libc = ctypes.CDLL(None)
_names = count(1)


class CpuTask:
    """What a stream runs: whether it has run, and what it raised. This one does nothing: it marks a position in the queue."""

    done = False
    error: BaseException | None = None

    def run(self) -> None:
        """Do it, once. What fails, interrupts included, is kept in `error`: the thread that waits for the task raises it."""
        self.done = True

    @property
    def state(self) -> str:
        """A word for `repr`."""
        return "failed" if self.error else "done" if self.done else "waiting"


class CpuStream:
    """Tasks that run one after another, in the order they were put."""

    def __init__(self, partition: "CpuPartition") -> None:
        self._partition = partition
        self._waiting: deque[CpuTask] = deque()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CpuStream of cores {ranges(self._partition.cores)}, {len(self._waiting)} waiting>"

    def put(self, task: CpuTask) -> None:
        """Queue a task, to `wait` for. Does not block; nothing runs yet."""
        self._waiting.append(task)

    def wait(self, task: CpuTask) -> None:
        """Run the tasks up to this one on the calling thread, or wait until another thread has; raise what this one raised.

        If the calling thread is not attached to the partition, they run on a new thread that is.
        """
        if not task.done:
            if self._partition.attached:
                with self._lock:
                    while not task.done:
                        self._waiting.popleft().run()
            else:
                self._partition.run(partial(self.wait, task))
        if task.error:
            raise task.error

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._waiting and not self._lock.locked()

    def drain(self) -> None:
        """Run everything that was put so far; errors are raised by the tasks' own `wait`. Blocks."""
        if not self.idle:
            last = CpuTask()
            self.put(last)
            self.wait(last)


class CpuPartition:
    """Cores reserved for one holder; see `partitions.base.Partition` for the contract."""

    def __init__(
        self, granules: Sequence[int], cores: Sequence[int], attached: threading.local, lent: Mapping[int, int] | None = None
    ) -> None:
        """`lent` has the cores of granules that are lent."""
        lent = lent or {}
        self.granules = tuple(granules)
        self.lent = tuple(lent)
        self.cores = tuple(cores)
        self.lent_cores = tuple(lent.values())
        self.home_cores = frozenset(self.cores) - set(self.lent_cores)
        self.stream = CpuStream(self)
        self._attached = attached
        self._closed = False

    def __repr__(self) -> str:
        lent = f", {ranges(self.lent_cores)} lent" if self.lent else ""
        return f"<CpuPartition cores {ranges(self.cores)}{lent}{', closed' if self._closed else ''}>"

    @property
    def size(self) -> int:
        return len(self.cores)

    @property
    def host_cores(self) -> frozenset[int] | None:
        return self.home_cores

    @property
    def attached(self) -> bool:
        """Whether the calling thread is attached to this partition, or to another one with the same home cores."""
        cores = getattr(self._attached, "cores", None)
        return cores is self.home_cores or cores == self.home_cores  # The first is quicker, and so for nearly all.

    @property
    def idle(self) -> bool:
        return self.stream.idle

    def attach(self) -> None:
        if self._closed:
            raise PartitionError(f"{self!r} cannot take another thread")
        os.sched_setaffinity(0, self.home_cores)
        self._attached.cores = self.home_cores

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

    def run_with_helpers(self, function: Callable[[], T]) -> T:
        """As `run`, for a function that starts threads which stay, such as a library's pool, and which keep the name of their
        creator: they and the calling thread are spread over the partition's cores, those on lent cores at SCHED_IDLE.

        The first ones stay on the home cores, as many as there are less one for the attached thread that works beside them.
        """
        if not self.lent:
            return self.run(function)
        name = f"wide {next(_names)}".encode()

        def body() -> T:
            _libc.prctl(_SET_NAME, name, 0, 0, 0)
            result = function()
            _libc.prctl(_SET_NAME, b"placed", 0, 0, 0)
            home = len(self.cores) - len(self.lent_cores)
            for number, thread in enumerate(_threads_named(name), 1):
                if (place := number % len(self.cores) - home) >= 0:
                    move_to_lent_core(thread, self.lent_cores[place], self.home_cores)
            return result

        return self.run(body)

    def locate(self) -> frozenset[int]:
        """The cores that the kernel allows attached threads and those on lent cores, and the ones they ran on."""

        def look(core: int | None = None) -> frozenset[int]:
            if core is not None:
                move_to_lent_core(threading.get_native_id(), core)
            return frozenset({*os.sched_getaffinity(0), _libc.sched_getcpu()})

        return self.run(look).union(*[self.run(partial(look, core)) for core in self.lent_cores])

    def hold(self, seconds: float) -> Held:
        raise PartitionError(f"{self!r} is not held: its cores have numbers, which `locate` returns")

    def strain(self, kind: Strain, seconds: float, before: Before = unheld) -> Strained:
        """See `Partition.strain`; on the home cores."""
        from .cpu_strain import strain  # Rarely needed, and NumPy is not otherwise.

        return self.run(lambda: strain(kind, seconds, self.home_cores, before=before))

    def close(self) -> None:
        if not self._closed:
            self.stream.drain()
            self._closed = True


class CpuDevice:
    """The cores this process may use, each a granule."""

    kind = "cpu"
    unit = "core"

    uuid = ""
    shared = False

    def __init__(self, cores: Sequence[int]) -> None:
        self.cores = tuple(cores)
        self.loads = UnpacedLoads()
        self._attached = threading.local()
        self.energy = open_rapl()
        """See `Device.energy`: of all processors of this machine, other programs included."""

    def __repr__(self) -> str:
        return f"<CpuDevice cores {ranges(self.cores)}>"

    @property
    def granules(self) -> tuple[int, ...]:
        return (1,) * len(self.cores)

    @property
    def address(self) -> str:
        return ",".join(map(str, self.cores))

    def describe(self) -> str:
        count = len(self.cores)
        return f"CPU, {count} core{'s' * (count != 1)} ({ranges(self.cores)})"

    def carve(self, granules: Sequence[int], lent: Sequence[int] = ()) -> CpuPartition:
        chosen = choose(granules, len(self.cores))
        cores = [self.cores[granule] for granule in chosen]
        borrowed = {granule: self.cores[granule] for granule in choose_lent(lent, chosen)}
        return CpuPartition(chosen, cores, self._attached, borrowed)

    def share(self, deposit: Deposit) -> None:
        """See `Device.share`: here processes share nothing."""

    def memory(self) -> int | None:
        """See `Device.memory`: this machine's."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def bandwidth(self) -> None:
        """See `Device.bandwidth`: what a core draws is not bounded by what cores there are."""

    def pin(self, address: int, nbytes: int) -> "CpuDevice":
        """Do nothing, and return something to close: cores reach all memory."""
        return self

    def close(self) -> None:
        """Do nothing: the cores are not released."""


def move_to_lent_core(thread: int, core: int, home: Iterable[int] = ()) -> None:
    """Let a thread of this process run on this core, and only while nothing else wants it. Any thread.

    With home cores, the kernel may move it there when the lender takes the core while it computes. So an inference is not held
    up for as long as the lender goes on. The priority cannot be undone without privileges. Where the kernel refuses it (a
    container's seccomp filter), the thread shares the core with the lender's, and the log says so once.
    """
    with suppress(ProcessLookupError):  # It has ended.
        os.sched_setaffinity(thread, {core, *home})
        try:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        except PermissionError as error:
            _warn_of_refusal(str(error))


@cache
def _warn_of_refusal(why: str) -> None:
    log.warning("threads on lent cores have the usual priority and delay the lender's, as SCHED_IDLE was refused: %s", why)


def _threads_named(name: bytes) -> list[int]:
    """The threads of this process with this name, in the order of their numbers."""
    found = []
    for folder in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # It has ended.
            if (folder / "comm").read_bytes().strip() == name:
                found.append(int(folder.name))
    return sorted(found)


def open_cpu(cores: Iterable[int] | None = None, root: Path = Path("/")) -> CpuDevice:
    """Open these cores, or all that this process's affinity and its cgroup's CPU quota allow.

    `root` is where /proc and /sys are. Raises DeviceUnavailable for a core the process may not use, and for no core at all.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if cores is None:
        taken = allowed[: _quota(root, len(allowed))]
        if len(taken) < len(allowed):
            log.warning(
                "a CPU quota allows this process fewer cores than the %s that it may run on, so it takes %s. A quota reserves "
                "none: whatever else may run there does so too, another container with a quota as well. Give the container "
                "cores of its own instead (docker --cpuset-cpus, Kubernetes' static CPU manager, systemd's AllowedCPUs)",
                ranges(allowed),
                ranges(taken),
            )
        return CpuDevice(taken)
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
    quotas = [quota for group in groups(root, "cpu") for quota in _read_quota(group)]
    return max(1, min([most, *map(math.floor, quotas)]))


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


def open_rapl(root: Path = Path("/")) -> Callable[[], int | None]:
    """The energy that the processors of this machine have taken, in microjoules, by what Linux shows of RAPL (only to root, on
    most machines); None where it cannot be read, as nothing is estimated.

    It counts all that they do, other programs included, and begins at 0 again from time to time.
    """
    folder = root / "sys/class/powercap"
    return partial(_read_rapl, [folder / name / "energy_uj" for name in _packages(folder)])


def _packages(folder: Path) -> list[str]:
    """The names of whole processors: `intel-rapl:0`, but not its parts, `intel-rapl:0:0`. AMD's have the same names."""
    try:
        return sorted(each.name for each in folder.iterdir() if each.name.count(":") == 1)
    except OSError:
        return []


def _read_rapl(files: list[Path]) -> int | None:
    try:
        return sum(int(file.read_text()) for file in files) if files else None
    except (OSError, ValueError):
        return None
