"""Cores held to shares of memory bandwidth, over a folder that behaves as the kernel documents it; on no hardware."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from partitions.resctrl import CoreGroups, CoreShare, Held
from tests.simulation.resctrl import KernelPath, cpus, groups, lay_out, meters, schemata

ACME, GLOBEX = CoreShare((0, 1), 0.4), CoreShare((2, 3), 0.25)


@pytest.fixture
def root(tmp_path: Path) -> KernelPath:
    return KernelPath(tmp_path)


@pytest.fixture
def base(root: KernelPath) -> KernelPath:
    return lay_out(root, 8)


def held(base: KernelPath) -> dict[str, tuple[set[int], dict[int, int]]]:
    """The cores and the limits of each of our groups, by the holder in its name."""
    return {
        each.name.split("-")[1]: (cpus(each), schemata(each)) for each in groups(base) if each.name.startswith("greenlane-")
    }


def unfenced(machine: CoreGroups, share: CoreShare = ACME) -> str:
    """Why a share is not held, as both a look and a try say."""
    looked, tried = machine.look({"acme": share})["acme"], machine.hold({"acme": share})["acme"]
    assert looked == tried
    assert not tried.how
    (note,) = tried.notes
    assert note.startswith("unfenced: its memory_bandwidth holds nothing back, as ")
    return note


def test_cores_of_each_holder_are_a_group_with_its_part(root: KernelPath, base: KernelPath) -> None:
    machine = CoreGroups(root)
    found = machine.look({"acme": ACME, "globex": GLOBEX})
    assert not groups(base), "a look changes nothing"
    assert machine.hold({"acme": ACME, "globex": GLOBEX}) == found
    assert found["acme"].how == "cores 0-1: MB:0=40, % of each L3 cache's memory bandwidth, by resctrl"
    assert found["acme"].notes == ()
    # Down to the processor's step, as the kernel would round up, and the shares would be more than all there is.
    assert held(base) == {"acme": ({0, 1}, {0: 40}), "globex": ({2, 3}, {0: 20})}
    assert cpus(base) == {4, 5, 6, 7}


def test_a_move_takes_cores_from_one_group_to_the_other(root: KernelPath, base: KernelPath) -> None:
    machine = CoreGroups(root)
    machine.hold({"acme": ACME, "globex": GLOBEX})
    before = set(groups(base))
    machine.hold({"acme": CoreShare((0, 1, 2), 0.6), "globex": CoreShare((3,), 0.25)})
    assert held(base) == {"acme": ({0, 1, 2}, {0: 60}), "globex": ({3}, {0: 20})}
    machine.hold({"acme": CoreShare((3,), 0.6), "globex": CoreShare((0, 1, 2), 0.25)})
    assert held(base) == {"acme": ({3}, {0: 60}), "globex": ({0, 1, 2}, {0: 20})}
    assert set(groups(base)) == before
    machine.hold({"acme": ACME})
    assert held(base) == {"acme": ({0, 1}, {0: 40})}
    assert cpus(base) == {2, 3, 4, 5, 6, 7}
    machine.close()
    assert not groups(base)
    assert cpus(base) == set(range(8))
    machine.close()


def test_each_cache_with_cores_is_limited(root: KernelPath) -> None:
    base = lay_out(root, 8, domains=2)
    CoreGroups(root).hold({"acme": CoreShare((3, 4, 5), 0.5), "globex": CoreShare((6,), 0.1)})
    assert held(base) == {"acme": ({3, 4, 5}, {0: 50, 1: 50}), "globex": ({6}, {0: 100, 1: 10})}


def test_less_than_the_processor_can_is_held_to_that_and_said(root: KernelPath, base: KernelPath) -> None:
    found = CoreGroups(root).hold({"acme": CoreShare((0,), 0.03)})["acme"]
    assert held(base) == {"acme": ({0}, {0: 10})}
    assert found.notes == ("its memory_bandwidth is 0.03, and this processor holds cores to 10 % at least",)
    assert CoreGroups(root).look({"acme": CoreShare((0,), 0.1)})["acme"].notes == ()


def test_a_part_is_not_a_step_less_for_how_floats_are_rounded(root: KernelPath, base: KernelPath) -> None:
    (base / "info/MB/bandwidth_gran").write_text("1\n")
    CoreGroups(root).hold({"acme": CoreShare((0,), 0.29)})
    assert held(base) == {"acme": ({0}, {0: 29})}


def test_a_group_that_was_removed_is_made_once_more(
    root: KernelPath, base: KernelPath, caplog: pytest.LogCaptureFixture
) -> None:
    machine = CoreGroups(root)
    machine.hold({"acme": ACME})
    (group,) = groups(base)
    KernelPath(group).rmdir()
    machine.hold({"acme": ACME})
    assert held(base) == {"acme": ({0, 1}, {0: 40})}
    assert not caplog.text, "there is nothing that stays"


def test_a_rate_is_refused_where_parts_are_taken(root: KernelPath, base: KernelPath) -> None:
    note = unfenced(CoreGroups(root), CoreShare((0,), 1_200_000_000_000))
    assert "it is a rate, 1200 GB/s, and resctrl takes parts here (% of each L3" in note
    assert "-o mba_MBps" in note
    assert not groups(base)


@pytest.mark.parametrize(
    ("file", "text", "default", "expected"),
    [
        ("proc/self/mounts", "resctrl /sys/fs/resctrl resctrl rw,mba_MBps 0 0\n", 2**32 - 1, {0: 6357, 1: 12715}),
        ("proc/cpuinfo", "vendor_id\t: AuthenticAMD\n", 2048, {0: 53, 1: 106}),
    ],
    ids=["mba_MBps", "amd"],
)
def test_rates_are_divided_by_cores_where_they_are_taken(
    root: KernelPath, file: str, text: str, default: int, expected: dict[int, int]
) -> None:
    base = lay_out(root, 8, domains=2, default=default)
    for name, value in (("min_bandwidth", 0), ("bandwidth_gran", 1)):
        (base / "info/MB" / name).write_text(f"{value}\n")
    (root / file).write_text(text)
    assert CoreGroups(root).hold({"acme": CoreShare((3, 4, 5), 20_000_000_000)})["acme"].how
    assert held(base) == {"acme": ({3, 4, 5}, expected)}
    assert "it is a part, 0.4, and resctrl takes rates here" in unfenced(CoreGroups(root))
    assert "MB:0=1," in CoreGroups(root).look({"acme": CoreShare((0,), 1000)})["acme"].how, "0 might be no limit"


def test_without_resctrl_it_is_said_what_is_missing(root: KernelPath) -> None:
    machine = CoreGroups(root)
    assert "this processor, kernel or virtual machine has no resctrl" in unfenced(machine)
    folder = root / "sys/fs/resctrl"
    folder.mkdir(parents=True)
    assert f"resctrl is not mounted; have root call: mount -t resctrl resctrl {folder}" in unfenced(machine)
    base = lay_out(root, 4)
    (base / "info/MB").rename(base / "info/none")
    assert "this processor does not limit memory bandwidth" in unfenced(machine)
    machine.close()


def test_a_server_in_a_group_of_its_own_is_not_held_by_its_cores(root: KernelPath, base: KernelPath) -> None:
    (root / "proc/self/cpu_resctrl_groups").write_text("res:batch\nmon:\n")
    machine = CoreGroups(root)
    assert "this server was put into the resctrl group batch" in unfenced(machine)
    (root / "proc/self/cpu_resctrl_groups").unlink()
    assert machine.hold({"acme": ACME})["acme"].how, "older kernels do not say it"


def test_without_the_right_to_make_groups_it_is_said_how_to_get_it() -> None:
    before = os.geteuid()
    user = before or 65534  # Root may write everywhere.
    with tempfile.TemporaryDirectory() as folder:  # Others may not look into pytest's.
        base = lay_out(KernelPath(folder), 4)
        for each in (Path(folder), *Path(folder).rglob("*")):
            each.chmod(0o755)
        base.chmod(0o555)
        os.seteuid(user)
        try:
            both = f"{base} {base / 'mon_groups'}"
            assert f"have root call: chown {user} {both} && chmod u+w {both}" in unfenced(CoreGroups(KernelPath(folder)))
        finally:
            os.seteuid(before)
            base.chmod(0o755)
        assert not groups(base)


def test_cores_in_a_group_of_others_stay_there(root: KernelPath, base: KernelPath) -> None:
    (base / "batch").mkdir()
    (base / "batch/cpus_list").write_text("1-2\n")
    found = CoreGroups(root).hold({"acme": ACME, "globex": CoreShare((4,), 0.25)})
    assert found["acme"].notes[0].endswith("some of its cores are in the resctrl group batch of others")
    assert held(base) == {"globex": ({4}, {0: 20})}
    assert cpus(base / "batch") == {1, 2}


class Leaving(KernelPath):
    """A group goes each time that all are listed: the first of `leaves`, none if that is empty."""

    leaves: Sequence[str] = ()

    def glob(self, pattern: str) -> Iterator[Any]:
        found = list(super().glob(pattern))
        if pattern in ("*/schemata", "*/cpus_list", "greenlane-*") and Leaving.leaves:
            name, *Leaving.leaves = Leaving.leaves
            if name:
                KernelPath(self / name).rmdir()
        return iter(found)


@pytest.mark.parametrize("leaves", [("", "", "batch"), ("greenlane-other-c0ffee",)])
def test_a_group_that_another_program_removes_meanwhile_keeps_nothing_from_being_held(
    root: KernelPath, base: KernelPath, leaves: tuple[str, ...]
) -> None:
    (base / leaves[-1]).mkdir()
    machine, Leaving.leaves = CoreGroups(Leaving(root)), leaves
    assert machine.hold({"acme": ACME})["acme"].how
    assert not Leaving.leaves
    assert held(base) == {"acme": ({0, 1}, {0: 40})}


class Unreadable(KernelPath):
    """Each read of the group `batch` fails with the first of these, and with none once there is none left."""

    errors: Sequence[int] = ()

    def read_text(self, *args: Any, **options: Any) -> str:
        if self.parent.name == "batch" and Unreadable.errors:
            number, *Unreadable.errors = Unreadable.errors
            raise OSError(number, os.strerror(number))
        return super().read_text(*args, **options)


def test_a_group_that_cannot_be_read_is_one_that_goes_or_is_said(root: KernelPath, base: KernelPath) -> None:
    (base / "batch").mkdir()
    machine, Unreadable.errors = CoreGroups(Unreadable(root)), (errno.EIO, errno.EIO)
    assert unfenced(machine).endswith("as [Errno 5] Input/output error")
    for hold in (machine.look, machine.hold):
        Unreadable.errors = (errno.ENODEV,)  # As the kernel says of a file that was open when its group was removed.
        assert hold({"acme": ACME})["acme"].how
        assert not Unreadable.errors
    assert held(base) == {"acme": ({0, 1}, {0: 40})}


def test_more_holders_than_the_processor_has_groups_for(root: KernelPath) -> None:
    base = lay_out(root, 8, closids=3)
    (base / "batch").mkdir()
    machine = CoreGroups(root)
    found = machine.look({"acme": ACME, "globex": GLOBEX})
    assert machine.hold({"acme": ACME, "globex": GLOBEX}) == found
    assert found["acme"].how
    full = "the 3 groups that this processor can have, the default one included, are in use; hold fewer tenants"
    assert found["globex"].notes[0].endswith(full)
    assert held(base) == {"acme": ({0, 1}, {0: 40})}
    # Another server's groups are found only by trying.
    other = CoreGroups(root)
    elsewhere = {"globex": CoreShare((4, 5), 0.25)}
    assert other.look(elsewhere)["globex"].how
    assert other.hold(elsewhere)["globex"].notes[0].endswith(f"{full} (Out of CLOSIDs)")


def test_what_the_kernel_refuses_leaves_no_group_and_is_said(root: KernelPath, base: KernelPath) -> None:
    (root / "sys/devices/system/cpu/cpu9/cache/index3").mkdir(parents=True)
    for name, text in {"level": "3", "id": "5"}.items():
        (root / f"sys/devices/system/cpu/cpu9/cache/index3/{name}").write_text(text)
    found = CoreGroups(root).hold({"acme": CoreShare((9,), 0.4), "globex": GLOBEX})
    assert found["acme"].notes[0].endswith("as [Errno 22] Invalid argument")
    assert held(base) == {"globex": ({2, 3}, {0: 20})}
    found = CoreGroups(root).hold({"acme": CoreShare((4,), 1.2)})
    assert found["acme"].notes[0].endswith("as [Errno 22] Invalid argument (MB value 120 out of range [10,100])")
    assert held(base).keys() == {"globex"}
    assert "core 12 has no L3 cache" in unfenced(CoreGroups(root), CoreShare((12,), 0.4))


def test_threads_of_the_same_physical_cores_are_named_where_the_lower_share_holds_for_both(
    root: KernelPath, base: KernelPath
) -> None:
    (base / "info/MB/thread_throttle_mode").write_text("max\n")
    found = CoreGroups(root).look({"acme": ACME, "globex": CoreShare((2, 5), 0.25)})
    assert found["acme"].notes == ()
    assert found["globex"].notes == ("cores 3-4 are held with them, as they are threads of the same physical cores",)


def write_counts(base: KernelPath, holder: str, *counts: object) -> None:
    """What the counters of a holder's group say, one for each L3 cache."""
    (group,) = [each for each in (*groups(base), *meters(base)) if each.name.split("-")[1] == holder]
    for number, count in enumerate(counts):
        (group / f"mon_data/mon_L3_{number:02}/mbm_total_bytes").write_text(f"{count}\n")


def test_bytes_are_counted_of_cores_that_are_held_and_of_others(root: KernelPath) -> None:
    base = lay_out(root, 8, domains=2)
    machine = CoreGroups(root)
    assert machine.hold({"acme": ACME, "globex": CoreShare((5, 6), None)})["globex"] == Held()
    (meter,) = meters(base)
    assert (cpus(meter), meter.name.split("-")[1]) == ({5, 6}, "globex")
    assert held(base).keys() == {"acme"}, "what is only counted takes none of the few groups that limit something"
    write_counts(base, "acme", 70_000_000_000, 5)
    write_counts(base, "globex", 0, 8)
    assert machine.moved() == {"acme": 70_000_000_005, "globex": 8}
    machine.close()
    assert (groups(base), meters(base)) == ([], [])
    assert machine.moved() == {}, "nothing counts now"
    machine.hold({"acme": ACME})
    assert machine.moved() == {"acme": 70_000_000_005}


@pytest.mark.parametrize("silent", ["Unavailable", "Error", "Unassigned"])
def test_a_counter_that_says_nothing_for_now_is_behind_until_it_does(root: KernelPath, silent: str) -> None:
    base = lay_out(root, 8, domains=2)
    machine = CoreGroups(root)
    machine.hold({"acme": ACME})
    write_counts(base, "acme", silent, silent)
    assert machine.moved() == {}
    write_counts(base, "acme", 100, 3)
    assert machine.moved() == {"acme": 103}
    write_counts(base, "acme", silent, 5)
    assert machine.moved() == {"acme": 105}
    write_counts(base, "acme", silent, silent)
    assert machine.moved() == {}, "nothing is known of this time, which is not that nothing was moved"
    write_counts(base, "acme", 130, 5)
    assert machine.moved() == {"acme": 135}


def test_bytes_never_fall_when_a_counter_or_a_group_begins_at_0(root: KernelPath, base: KernelPath) -> None:
    machine = CoreGroups(root)
    machine.hold({"acme": ACME})
    write_counts(base, "acme", 100)
    assert machine.moved() == {"acme": 100}
    write_counts(base, "acme", 30)  # AMD's may be taken away and given back.
    assert machine.moved() == {"acme": 130}
    write_counts(base, "acme", 50)
    machine.hold({"acme": CoreShare((0, 1), None)})
    assert not groups(base)
    assert machine.moved() == {"acme": 150}, "also what it moved last in the group that it has no more"
    write_counts(base, "acme", 7)
    machine.hold({"acme": ACME})
    assert not meters(base)
    assert machine.moved() == {"acme": 157}


def test_cores_that_move_are_counted_where_they_are(root: KernelPath, base: KernelPath) -> None:
    machine = CoreGroups(root)
    machine.hold({"acme": ACME, "globex": CoreShare((2, 3), None), "initech": CoreShare((4, 5), None)})
    machine.hold({"acme": CoreShare((0,), 0.4), "globex": CoreShare((1, 2, 3, 4), None), "initech": CoreShare((5,), None)})
    assert {each.name.split("-")[1]: cpus(each) for each in meters(base)} == {"globex": {1, 2, 3, 4}, "initech": {5}}
    machine.hold({"acme": CoreShare((0, 5), 0.4), "globex": CoreShare((1, 2), None)})
    assert {each.name.split("-")[1]: cpus(each) for each in meters(base)} == {"globex": {1, 2}}
    assert held(base) == {"acme": ({0, 5}, {0: 40})}


def test_cores_that_cannot_be_held_are_counted(root: KernelPath, base: KernelPath) -> None:
    (base / "info/MB").rename(base / "info/none")
    machine = CoreGroups(root)
    assert "this processor does not limit memory bandwidth" in unfenced(machine)
    (meter,) = meters(base)
    assert cpus(meter) == {0, 1}


def count_nothing(base: KernelPath) -> None:
    (base / "info/L3_MON").rename(base / "info/none")


def be_monitored(base: KernelPath) -> None:
    (base / "mon_groups/others").mkdir()
    (base / "mon_groups/others/cpus_list").write_text("1\n")


def have_few_rmids(base: KernelPath) -> None:
    (base / "info/L3_MON/num_rmids").write_text("1\n")


def be_in_a_group_of_others(base: KernelPath) -> None:
    (base / "batch").mkdir()
    (base / "batch/cpus_list").write_text("1\n")


@pytest.mark.parametrize("why", [count_nothing, be_monitored, have_few_rmids, be_in_a_group_of_others])
def test_what_cannot_be_counted_is_not_and_takes_nothing(
    root: KernelPath, base: KernelPath, why: Callable[[KernelPath], None]
) -> None:
    why(base)
    before = {each: cpus(each) for each in (*groups(base), *meters(base))}
    machine = CoreGroups(root)
    assert machine.hold({"acme": CoreShare((0, 1), None)}) == {"acme": Held()}
    assert machine.moved() == {}
    assert {each: cpus(each) for each in (*groups(base), *meters(base))} == before


@pytest.mark.parametrize("why", [count_nothing, be_monitored, be_in_a_group_of_others])
def test_what_can_be_counted_no_more_is_not_counted_in_part(
    root: KernelPath, base: KernelPath, why: Callable[[KernelPath], None]
) -> None:
    machine = CoreGroups(root)
    machine.hold({"acme": CoreShare((0, 1), None)})
    assert machine.moved() == {"acme": 0}
    why(base)
    machine.hold({"acme": CoreShare((0, 1), None)})
    assert machine.moved() == {}
    assert not [each for each in meters(base) if each.name.startswith("greenlane")]


def test_a_server_that_another_program_monitors_is_held_but_not_counted(root: KernelPath, base: KernelPath) -> None:
    (root / "proc/self/cpu_resctrl_groups").write_text("res:/\nmon:others\n")
    machine = CoreGroups(root)
    assert machine.hold({"acme": ACME})["acme"].how
    write_counts(base, "acme", 5)  # Something else on these cores.
    assert machine.moved() == {}


HOLD = """
import sys
from partitions.resctrl import CoreGroups, CoreShare
from tests.simulation.resctrl import KernelPath
groups = CoreGroups(KernelPath(sys.argv[1]))
groups.hold({"acme": CoreShare((0, 1), 0.4), "globex": CoreShare((2,), None)})
print("held", flush=True)
sys.stdin.read()
"""


def test_the_next_start_removes_what_a_killed_server_left_and_nothing_of_one_that_lives(
    root: KernelPath, base: KernelPath
) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, str(root)], stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        assert process.stdout.readline() == b"held\n"
        machine = CoreGroups(root)
        machine.hold({})
        assert held(base) == {"acme": ({0, 1}, {0: 40})}, "its process lives"
        assert [cpus(each) for each in meters(base)] == [{2}]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert held(base), "nothing removes it before the next start"
        (base / "batch").mkdir()
        machine.hold({})
        assert [each.name for each in groups(base)] == ["batch"]
        assert not meters(base)
        assert cpus(base) == set(range(8))


def state(base: KernelPath) -> dict[str, tuple[set[int], str]]:
    """The cores and the limits of every group."""
    both = (*groups(base), *meters(base))
    return {each.name: (cpus(each), "" if each in meters(base) else (each / "schemata").read_text()) for each in both}


@pytest.mark.parametrize("first", [ACME, CoreShare((0, 1), None)], ids=["held", "counted"])
@pytest.mark.parametrize("second", [CoreShare((1, 2), 0.25), CoreShare((1, 2), None)], ids=["holds", "counts"])
def test_cores_of_a_server_that_runs_stay_its_own_whatever_another_one_does(
    root: KernelPath, base: KernelPath, first: CoreShare, second: CoreShare
) -> None:
    one, other = CoreGroups(root), CoreGroups(root)
    one.hold({"acme": first})
    before = state(base)
    (group,) = before
    for share in (second, CoreShare((0, 1, 2), second.most)):
        notes = other.hold({"globex": share, "initech": CoreShare((4,), second.most)})["globex"].notes
        why = f"some of its cores are in the resctrl group {group} of others"
        assert [note.endswith(why) for note in notes] == [True] * (second.most is not None)
        assert other.blocked, "it may be held once that server has ended"
        assert {name.split("-")[1] for name in state(base).keys() - before.keys()} == {"initech"}, "what it has to itself"
        assert state(base)[group] == before[group]
    write_counts(base, "acme", 100)
    assert (one.moved(), other.moved()) == ({"acme": 100}, {"initech": 0})
    one.hold({"acme": CoreShare((0, 1, 3), first.most)})
    assert not one.blocked
    other.close()
    assert [cores for cores, _ in state(base).values()] == [{0, 1, 3}]
    one.close()
    other.hold({"globex": second})
    assert not other.blocked
    assert [cores for cores, _ in state(base).values()] == [{1, 2}]


def test_another_program_that_keeps_the_lock_on_all_groups_is_named(root: KernelPath, base: KernelPath) -> None:
    machine = CoreGroups(root)
    machine.hold({"acme": ACME})
    lock = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (note,) = machine.hold({"acme": ACME})["acme"].notes
        assert f"another program has {base} locked (flock) for 0.5 s" in note
        assert not groups(base), "what is not held as it is to be is not held"
        assert machine.blocked
    finally:
        os.close(lock)
    assert machine.hold({"acme": ACME})["acme"].how
    assert not machine.blocked


def masks(base: KernelPath, resource: str = "L3") -> dict[str, dict[int, int]]:
    """The ways of L3 caches that each of our groups has."""
    return {each.name.split("-")[1]: schemata(each, resource) for each in groups(base) if each.name.startswith("greenlane-")}


def test_each_holder_fills_its_part_of_the_cache_apart_from_the_others(root: KernelPath) -> None:
    base = lay_out(root, 8, domains=2, ways=11)
    machine = CoreGroups(root)
    found = machine.hold({"acme": ACME, "globex": GLOBEX, "initech": CoreShare((3, 4), 0.35)})
    assert masks(base) == {
        "acme": {0: 0b00000001111, 1: 0b11111111111},
        "globex": {0: 0b00000110000, 1: 0b11111111111},
        "initech": {0: 0b00111000000, 1: 0b00000000111},
    }
    assert held(base)["acme"] == ({0, 1}, {0: 40, 1: 100})
    how = "cores 0-1: MB:0=40, % of each L3 cache's memory bandwidth; L3:0=f, a mask of 11 ways, by resctrl"
    assert found["acme"] == Held(how)
    assert schemata(base, "L3") == {0: 2**11 - 1, 1: 2**11 - 1}, "what is not held may fill all of it"
    machine.hold({"globex": CoreShare((2, 3), 0.5)})
    assert masks(base)["globex"][0] == 0b00000011111


def test_a_part_is_not_a_way_less_for_how_floats_are_rounded(root: KernelPath) -> None:
    base = lay_out(root, 8, ways=22)
    found = CoreGroups(root).hold({"acme": CoreShare((0,), 15 / 22)})["acme"]
    assert (masks(base), found.notes) == ({"acme": {0: 2**15 - 1}}, ())


def test_a_part_below_what_the_processor_gives_is_said_and_ways_are_shared_where_there_are_too_few(root: KernelPath) -> None:
    base = lay_out(root, 8, ways=4)
    (base / "info/L3/min_cbm_bits").write_text("2\n")
    found = CoreGroups(root).hold({"acme": CoreShare((0,), 0.75), "globex": CoreShare((2,), 0.1), "none": CoreShare((3,), 0.1)})
    assert masks(base) == {"acme": {0: 0b0111}, "globex": {0: 0b1100}, "none": {0: 0b1100}}
    least = "its part of the L3 cache is 0.1, and this processor gives 2 of 4 ways at least"
    shared = "it has ways of the L3 cache that another held tenant has, as there are too few"
    assert found["acme"].notes == ()
    assert found["globex"].notes == found["none"].notes == (least, shared)
    assert CoreGroups(root).look({"acme": CoreShare((0,), 1.0)})["acme"].how.count("L3:0=f,"), "all there is"
    (base / "info/L3/min_cbm_bits").write_text("0\n")  # As AMD's may have none.
    assert CoreGroups(root).look({"acme": CoreShare((0,), 0.1)})["acme"].how.count("L3:0=1,")


def test_code_and_data_get_the_same_ways_where_the_cache_divides_them(root: KernelPath) -> None:
    base = lay_out(root, 8, ways=10, caches=("L3CODE", "L3DATA"))
    found = CoreGroups(root).hold({"acme": ACME})["acme"]
    assert "L3CODE:0=f L3DATA:0=f, a mask of 10 ways" in found.how
    assert masks(base, "L3CODE") == masks(base, "L3DATA") == {"acme": {0: 0b1111}}


def test_a_cache_is_divided_where_bandwidth_is_not(root: KernelPath) -> None:
    base = lay_out(root, 8, default=0, ways=10)
    found = CoreGroups(root).hold({"acme": ACME})["acme"]
    assert found.how == "cores 0-1: L3:0=f, a mask of 10 ways, by resctrl"
    (note,) = found.notes
    assert note.startswith("of its memory_bandwidth only its part of the L3 cache is held, as this processor does not limit")
    assert masks(base) == {"acme": {0: 0b1111}}


def test_of_a_rate_the_cache_is_divided_by_cores(root: KernelPath) -> None:
    base = lay_out(root, 8, domains=2, default=2**32 - 1, ways=16)
    (root / "proc/self/mounts").write_text("resctrl /sys/fs/resctrl resctrl rw,mba_MBps 0 0\n")
    CoreGroups(root).hold({"acme": CoreShare((3, 4, 5), 20_000_000_000), "globex": CoreShare((0,), 10**9)})
    assert masks(base) == {"acme": {0: 0xF, 1: 0xFF}, "globex": {0: 0xF0, 1: 0xFFFF}}


def test_bandwidth_is_held_where_the_ways_are_another_groups_alone(root: KernelPath) -> None:
    base = lay_out(root, 8, ways=10)
    (base / "batch").mkdir()
    (base / "batch/schemata").write_text("L3:0=3\n")
    (base / "batch/mode").write_text("exclusive\n")
    machine = CoreGroups(root)
    found = machine.hold({"acme": ACME})["acme"]
    assert found.how == "cores 0-1: MB:0=40, % of each L3 cache's memory bandwidth, by resctrl"
    assert found.notes == (
        "its part of the L3 cache is not held, as [Errno 22] Invalid argument (Overlaps with exclusive group)",
    )
    assert held(base) == {"acme": ({0, 1}, {0: 40})}
    assert not machine.blocked, "it would not be held later either"


@pytest.mark.parametrize("limbo", [True, False])
def test_what_the_kernel_cannot_count_for_now_is_not_held_but_may_be_later(
    root: KernelPath, base: KernelPath, limbo: bool
) -> None:
    (base / "info/L3_MON/num_rmids").write_text("2\n")
    (base / "batch").mkdir()
    if limbo:
        (base / "limbo").write_text("")
    machine = CoreGroups(root)
    (note,) = machine.hold({"acme": ACME})["acme"].notes
    assert "(Out of RMIDs)" in note
    assert "hold fewer tenants" not in note
    assert machine.blocked
    (base / "batch").rmdir()
    assert machine.hold({"acme": ACME})["acme"].how
    assert not machine.blocked
