"""What cores do to strain memory: on which of them, of how many bytes, and what is said where there is too little."""

import os
from pathlib import Path

import pytest

from partitions import PartitionError, Unsupported
from partitions.cpu import open_cpu
from partitions.cpu_strain import KINDS, MOST, USUAL, last_cache, strain
from partitions.strain import Strain, Strained
from tests.partitions.test_cpu import aside

MIB = 1 << 20
CORE = min(os.sched_getaffinity(0))


def machine(root: Path, **caches: str) -> Path:
    """A machine whose first core has these caches, by level."""
    for index, (level, size) in enumerate(caches.items()):
        folder = root / f"sys/devices/system/cpu/cpu{CORE}/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "level").write_text(level.removeprefix("l") + "\n")
        (folder / "size").write_text(size + "\n")
    return root


@pytest.mark.parametrize(
    ("caches", "expected"),
    [
        ({"l1": "48K", "l2": "1024K", "l3": "32768K"}, 32 * MIB),
        ({"l3": "8M", "l2": "512"}, 8 * MIB),
        ({"l2": "2048K", "l3": "unknown"}, 2 * MIB),
        ({}, USUAL),
    ],
)
def test_the_last_cache_is_that_of_the_highest_level_whose_size_is_known(
    tmp_path: Path, caches: dict[str, str], expected: int
) -> None:
    assert last_cache(CORE, machine(tmp_path, **caches)) == expected


def test_a_strain_that_would_take_most_of_the_memory_is_refused(tmp_path: Path) -> None:
    root = machine(tmp_path, l3="32M")
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 120000 kB\n")
    with pytest.raises(PartitionError, match=r"^a strain of memory read needs 67 MB of memory, and 123 MB are free, of which"):
        strain("memory read", 0.001, [CORE], root)
    aside(lambda: strain("L2", 0.001, [CORE], root))


def test_what_is_refused_is_no_pass() -> None:
    """Or it would be billed."""
    device, passes = open_cpu(), list[int]()
    partition = device.carve([0])
    for kind, seconds in (("PCIe out", 0.01), ("L2", 3.0)):
        with pytest.raises((Unsupported, ValueError)):
            aside(lambda kind=kind, seconds=seconds: partition.strain(kind, seconds, passes.append))
    assert not passes
    aside(lambda: partition.strain("L2", 0.001, passes.append))
    assert passes == [0]
    partition.close()


def test_each_core_has_a_thread_that_runs_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    device, pinned = open_cpu(), list[set[int]]()
    pin = os.sched_setaffinity

    def note(thread: int, cores: set[int]) -> None:
        pinned.append(set(cores))
        pin(thread, cores)

    monkeypatch.setattr(os, "sched_setaffinity", note)
    aside(lambda: strain("L2", 0.01, device.cores))
    assert sorted(map(sorted, pinned)) == [[core] for core in device.cores]


def test_a_larger_cache_takes_more_memory_but_no_more_than_there_is_a_bound_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    taken = list[int]()
    make = np.empty

    def note(count: int, *kinds: object) -> object:
        taken.append(count * 8)
        return make(1, *kinds)

    monkeypatch.setattr("partitions.cpu_strain.np.empty", note)
    for size in ("64M", "1024M"):
        aside(lambda size=size: strain("memory read", 0.001, [CORE], machine(tmp_path / size, l3=size)))
    assert taken == [128 * MIB, MOST]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [3, 5, 7])
def test_every_kind_can_be_done_by_any_number_of_cores(tmp_path: Path, kind: Strain, count: int) -> None:
    """Their parts of a cache need not be whole sectors."""
    done: list[Strained] = []
    aside(lambda: done.append(strain(kind, 0.001, [CORE] * count, machine(tmp_path, l3="128M"))))
    assert done[0].nbytes > 0


def test_too_little_memory_is_an_error_with_how_much_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr("partitions.cpu_strain.np.empty", refuse)
    with pytest.raises(PartitionError, match=r"^there are no \d+ bytes of memory for a strain of memory write: none left"):
        aside(lambda: strain("memory write", 0.01, [CORE]))
