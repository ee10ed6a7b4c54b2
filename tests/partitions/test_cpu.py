import os
import random
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from threading import Barrier, Event, get_ident, get_native_id
from typing import TypeVar

import pytest

from partitions import DeviceUnavailable, PartitionError
from partitions.cpu import CpuDevice, CpuPartition, CpuStream, CpuTask, open_cpu
from tests.contract import PATIENCE, in_a_thread

T = TypeVar("T")
NOT_ALLOWED = max(os.sched_getaffinity(0)) + 1


def aside(function: Callable[[], T]) -> T:
    """Call it on a thread of its own, so that pinning it does not affect later tests."""
    return in_a_thread(function)[1].result(PATIENCE)


def test_a_thread_belongs_to_the_partition_it_was_attached_to_last(device: CpuDevice, partition: CpuPartition) -> None:
    last = device.carve([len(device.cores) - 1])

    def attach() -> tuple[bool, bool, set[int]]:
        partition.attach()
        last.attach()
        return partition.attached, last.attached, os.sched_getaffinity(0)

    assert aside(attach) == (False, True, {device.cores[-1]})


def test_run_pins_the_function_and_not_its_caller(device: CpuDevice, partition: CpuPartition) -> None:
    before = os.sched_getaffinity(0)
    assert partition.run(lambda: os.sched_getaffinity(0)) == {device.cores[0]}
    assert os.sched_getaffinity(0) == before


def test_a_partition_ran_on_the_cores_it_holds_and_no_other(device: CpuDevice) -> None:
    every = range(len(device.cores))
    assert [device.carve([granule]).locate() for granule in every] == [{core} for core in device.cores]
    assert device.carve(list(every)).locate() == set(device.cores)


def test_a_closed_partition_takes_no_thread(partition: CpuPartition) -> None:
    partition.close()
    for use in (partition.attach, partition.locate, lambda: partition.run(lambda: None)):
        with pytest.raises(PartitionError, match="closed> cannot take another thread"):
            use()


def test_closing_a_partition_runs_what_is_left_on_its_stream(partition: CpuPartition) -> None:
    ran: list[int] = []
    tasks = [_put(partition.stream, ran, number) for number in range(3)]
    partition.close()
    partition.close()
    assert ran == [0, 1, 2]
    assert tasks[-1].state == "done"


@pytest.mark.parametrize("granules", [[], [-1], [10_000], [0, 0]])
def test_granules_that_cannot_be_carved_are_named(device: CpuDevice, granules: list[int]) -> None:
    with pytest.raises(PartitionError, match=r"no granules were named|is not there|named more than once"):
        device.carve(granules)


def test_a_number_of_granules_is_no_list_of_them(device: CpuDevice) -> None:
    with pytest.raises(TypeError, match=r"a list of their numbers, such as \[0, 1\]; got 0$"):
        device.carve(0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cores", "text"), [([0], "0"), ([0, 1], "0-1"), ([6, 3, 2, 1, 0], "0-3,6"), ([0, 2, 4], "0,2,4"), ([9, 8, 1], "1,8-9")]
)
def test_cores_are_shown_as_ranges(cores: list[int], text: str) -> None:
    device = CpuDevice(cores)
    assert repr(device) == f"<CpuDevice cores {text}>"
    assert repr(device.carve(range(len(cores)))) == f"<CpuPartition cores {text}>"
    assert text in device.describe()


def test_a_device_says_how_it_divides() -> None:
    assert CpuDevice([0, 1, 2]).describe() == "CPU, 3 cores (0-2)"
    assert CpuDevice([5]).describe() == "CPU, 1 core (5)"
    assert CpuDevice([4, 6]).address == "4,6"
    assert CpuDevice([2, 7]).granules == (1, 1)


# Lent cores


@pytest.fixture
def wide(device: CpuDevice) -> CpuPartition:
    if len(device.cores) == 1:
        pytest.skip("a device of one core has none to lend")
    return device.carve(range(len(device.cores)), range(1, len(device.cores)))


def _helpers(count: int, leave: Event) -> list[int]:
    """The numbers of threads that stay until `leave` is set. Threads of `threading` would have names of their own."""
    started: list[int] = []
    there = Barrier(count + 1)

    def stay() -> None:
        started.append(get_native_id())
        there.wait(PATIENCE)
        leave.wait(PATIENCE)

    for _ in range(count):
        start_new_thread(stay, ())
    there.wait(PATIENCE)
    return sorted(started)


def test_helper_threads_run_on_lent_cores_at_idle_priority_and_attached_ones_on_home_cores(wide: CpuPartition) -> None:
    leave, lent = Event(), wide.lent_cores
    helpers = wide.run_with_helpers(lambda: _helpers(len(lent), leave))
    found = [(os.sched_getaffinity(helper), os.sched_getscheduler(helper)) for helper in helpers]
    leave.set()
    assert sorted(found, key=str) == [({core, *wide.home_cores}, os.SCHED_IDLE) for core in lent]
    here = wide.run(lambda: (os.sched_getaffinity(0), os.sched_getscheduler(0)))
    assert here == (wide.home_cores, os.SCHED_OTHER)


def test_a_home_partition_leaves_helper_threads_where_their_creator_is(device: CpuDevice, partition: CpuPartition) -> None:
    leave = Event()
    (helper,) = partition.run_with_helpers(lambda: _helpers(1, leave))
    assert (os.sched_getaffinity(helper), os.sched_getscheduler(helper)) == ({device.cores[0]}, os.SCHED_OTHER)
    leave.set()


def test_a_kernel_that_refuses_idle_threads_is_logged_once_and_they_run(
    wide: CpuPartition, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, why)

    why = f"refused at {time.monotonic_ns()}"  # The same reason is never logged again.
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    leave = Event()
    for _ in range(2):
        helpers = wide.run_with_helpers(lambda: _helpers(1, leave))
        assert [os.sched_getaffinity(helper) for helper in helpers] == [{wide.lent_cores[0], *wide.home_cores}]
    leave.set()
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "threads on lent cores have the usual priority and delay the lender's, as SCHED_IDLE was refused"
    ]


# Streams


class Call(CpuTask):
    """Calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self.error = error
        self.done = True


def put(stream: CpuStream, function: Callable[[], object]) -> CpuTask:
    task = Call(function)
    stream.put(task)
    return task


def _put(stream: CpuStream, ran: list[int], number: int) -> CpuTask:
    return put(stream, lambda: ran.append(number))


def _raise(error: BaseException) -> None:
    raise error


def test_nothing_runs_before_a_thread_waits(partition: CpuPartition) -> None:
    ran: list[int] = []
    task = _put(partition.stream, ran, 1)
    assert not ran
    assert task.state == "waiting"
    assert repr(partition.stream).endswith(", 1 waiting>")
    partition.stream.wait(task)
    assert ran == [1]
    assert task.state == "done"


def test_waiting_for_a_task_runs_those_before_it_and_none_after(partition: CpuPartition) -> None:
    ran: list[int] = []
    tasks = [_put(partition.stream, ran, number) for number in range(5)]
    partition.stream.wait(tasks[2])
    assert ran == [0, 1, 2]
    partition.stream.wait(tasks[0])
    assert ran == [0, 1, 2]
    partition.stream.wait(tasks[4])
    assert ran == [0, 1, 2, 3, 4]


def test_an_attached_thread_runs_what_it_waits_for_itself(partition: CpuPartition) -> None:
    def wait() -> tuple[int, list[int]]:
        seen: list[int] = []
        partition.attach()
        partition.stream.wait(put(partition.stream, lambda: seen.append(get_ident())))
        return get_ident(), seen

    thread, seen = aside(wait)
    assert seen == [thread]


def test_waiting_on_a_thread_that_is_not_attached_runs_pinned(device: CpuDevice, partition: CpuPartition) -> None:
    seen: list[set[int]] = []
    partition.stream.wait(put(partition.stream, lambda: seen.append(os.sched_getaffinity(0))))
    assert seen == [{device.cores[0]}]


def test_a_partition_is_idle_while_nothing_runs_or_waits_on_its_stream(partition: CpuPartition) -> None:
    seen: list[bool] = []
    assert partition.idle
    task = put(partition.stream, lambda: seen.append(partition.idle))
    assert not partition.idle
    partition.stream.wait(task)
    assert partition.idle
    assert seen == [False]


def test_a_task_s_error_is_raised_by_its_own_wait_only(partition: CpuPartition) -> None:
    stream, ran = partition.stream, list[int]()
    bad = put(stream, lambda: _raise(ValueError("no")))
    good = _put(stream, ran, 1)
    stream.wait(good)
    assert ran == [1]
    assert bad.state == "failed"
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            stream.wait(bad)


def test_an_interrupted_task_has_ended_and_the_stream_goes_on(partition: CpuPartition) -> None:
    stream, ran = partition.stream, list[int]()
    interrupted = put(stream, lambda: _raise(KeyboardInterrupt()))
    later = _put(stream, ran, 1)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            stream.wait(interrupted)
    stream.wait(later)
    assert ran == [1]


def test_concurrent_waits_keep_the_order_of_the_stream(partition: CpuPartition) -> None:
    ran: list[int] = []
    tasks = [_put(partition.stream, ran, number) for number in range(200)]
    shuffled = random.Random(0).sample(tasks, len(tasks))

    def wait(mine: Iterable[CpuTask]) -> None:
        partition.attach()
        for task in mine:
            partition.stream.wait(task)

    waiting = [in_a_thread(partial(wait, shuffled[first::4]))[1] for first in range(4)]
    for ended in waiting:
        ended.result(PATIENCE)
    assert ran == list(range(200))


def test_draining_runs_all_tasks_and_leaves_errors_to_their_waits(partition: CpuPartition) -> None:
    stream, ran = partition.stream, list[int]()
    _put(stream, ran, 1)
    bad = put(stream, lambda: _raise(ValueError("no")))
    stream.drain()
    stream.drain()
    assert ran == [1]
    with pytest.raises(ValueError, match="no"):
        stream.wait(bad)


def test_draining_ends_although_more_is_put_meanwhile(partition: CpuPartition) -> None:
    stream, ran = partition.stream, list[int]()

    def again() -> None:
        ran.append(len(ran))
        if len(ran) < 100:
            put(stream, again)

    put(stream, again)
    stream.drain()
    assert ran == [0]
    stream.drain()
    assert ran == [0, 1]


# Opening: which cores


def _cgroups(root: Path, lines: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"a/cpu.max": "300000 100000\n"}, 3),
        ({"a/cpu.max": "350000 100000\n"}, 3),
        ({"a/cpu.max": "50000 100000\n"}, 1),
        ({"a/cpu.max": "max 100000\n"}, 8),
        ({"a/cpu.max": "6400000 100000\n"}, 8),
        ({"a/cpu.max": "max 100000\n", "a/b/cpu.max": "500000 100000\n"}, 5),
        ({"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "500000 100000\n"}, 2),
        ({"elsewhere/cpu.max": "100000 100000\n"}, 8),
        ({}, 8),
    ],
)
def test_the_tightest_quota_of_cgroup_v2_limits_the_cores(tmp_path: Path, files: dict[str, str], count: int) -> None:
    device = open_cpu(root=_cgroups(tmp_path, "0::/a/b\n", files))
    assert device.cores == tuple(range(count))


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("quota", "count"), [("400000", 4), ("-1", 8), ("10000", 1)])
@pytest.mark.parametrize("group", ["cpu/docker/x", "cpu"])
def test_the_quota_of_cgroup_v1_limits_the_cores(tmp_path: Path, group: str, quota: str, count: int) -> None:
    files = {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": "100000\n"}
    root = _cgroups(tmp_path, "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n0::/\n", files)
    assert len(open_cpu(root=root).cores) == count


@pytest.mark.usefixtures("eight_cores")
def test_a_quota_on_another_controller_s_group_means_nothing(tmp_path: Path) -> None:
    files = {"cpu/memory-only/cpu.cfs_quota_us": "100000", "cpu/memory-only/cpu.cfs_period_us": "100000"}
    assert len(open_cpu(root=_cgroups(tmp_path, "5:memory:/memory-only\n", files)).cores) == 8


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("quota", "warned"), [("350000", True), ("800000", False), ("max", False)])
def test_a_quota_that_leaves_fewer_cores_than_the_process_may_run_on_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quota: str, warned: bool
) -> None:
    open_cpu(root=_cgroups(tmp_path, "0::/a\n", {"a/cpu.max": f"{quota} 100000\n"}))
    assert ("fewer cores than the 0-7 that it may run on, so it takes 0-2. A quota reserves none" in caplog.text) == warned


@pytest.mark.usefixtures("eight_cores")
def test_a_system_without_cgroups_leaves_every_core(tmp_path: Path) -> None:
    assert len(open_cpu(root=tmp_path).cores) == 8


def test_a_process_that_is_confined_is_offered_its_own_cores_only(tmp_path: Path) -> None:
    last = max(os.sched_getaffinity(0))

    def confined() -> CpuDevice:
        os.sched_setaffinity(0, {last})
        return open_cpu(root=tmp_path)

    assert aside(confined).cores == (last,)


@pytest.mark.usefixtures("eight_cores")
def test_named_cores_are_used_in_order_regardless_of_the_quota(tmp_path: Path) -> None:
    root = _cgroups(tmp_path, "0::/\n", {"cpu.max": "100000 100000"})
    assert open_cpu([5, 2, 5], root).cores == (2, 5)


def test_a_core_that_the_process_may_not_use_is_refused_with_those_it_may() -> None:
    allowed = CpuDevice(sorted(os.sched_getaffinity(0))).describe().partition("(")[2].partition(")")[0]
    with pytest.raises(DeviceUnavailable) as caught:
        open_cpu([NOT_ALLOWED, NOT_ALLOWED + 1])
    assert str(caught.value) == (f"cores {NOT_ALLOWED}-{NOT_ALLOWED + 1} are not among those this process may use: {allowed}")


def test_no_core_at_all_is_refused() -> None:
    with pytest.raises(DeviceUnavailable, match="no core"):
        open_cpu([])


@pytest.mark.usefixtures("eight_cores")
def test_cores_may_be_named_one_by_one() -> None:
    assert open_cpu(core for core in (1, 3)).cores == (1, 3)
