"""What Linux says of cores and memory, and readings as lines."""

from pathlib import Path

import pytest

from partitions.health import (
    CoreTime,
    Health,
    core_times,
    cores_of,
    from_line,
    host_memory,
    memory_left,
    on_bus,
    spelled,
    to_line,
)

STAT = """cpu  300 0 100 1600 0 0 0 0 0 0
cpu0 100 0 50 800 50 0 0 0 70 0
cpu5 200 20 50 700 0 10 10 10 0 0
intr 12345
"""


def test_a_core_is_busy_while_it_neither_idles_nor_waits_for_a_disk(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(STAT)
    found = core_times(tmp_path)
    assert set(found) == {0, 5}
    assert found[0].busy / found[0].all == 150 / 1000
    assert found[5].busy / found[5].all == 300 / 1000


def test_this_machine_says_something() -> None:
    assert all(isinstance(each, CoreTime) and 0 < each.busy <= each.all for each in core_times().values())
    total, used = host_memory()
    assert 0 < used < total


AVAILABLE = 8 << 30


@pytest.mark.parametrize(
    ("lines", "files", "left"),
    [
        ("", {}, AVAILABLE),
        ("0::/\n", {}, AVAILABLE),
        ("0::/a/b\n", {"a/b": ("max", 3, 0)}, AVAILABLE),
        ("0::/a/b\n", {"a/b": ("max", 3, 0), "a": ("5000", 4000, 700)}, 1700),
        ("0::/a\n", {"a": ("5000", 6000, 0)}, 0),
        ("4:memory:/a\n", {"memory/a": (str(1 << 62), 3, 0)}, AVAILABLE),
        ("4:cpu,memory:/a\n0::/b\n", {"memory/a": ("5000", 1000, 500), "b": ("max", 1, 0)}, 4500),
    ],
)
def test_the_memory_that_is_left_is_what_the_tightest_group_allows(
    tmp_path: Path, lines: str, files: dict[str, tuple[str, int, int]], left: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {AVAILABLE >> 9} kB\nMemAvailable: {AVAILABLE >> 10} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(lines)
    for name, (most, taken, inactive) in files.items():
        group = tmp_path / "sys/fs/cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        v1 = name.startswith("memory")
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{most}\n")
        (group / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{taken}\n")
        (group / "memory.stat").write_text(f"anon 7\n{'total_' * v1}inactive_file {inactive}\n")
    assert memory_left(tmp_path) == left


def test_a_reading_is_the_same_as_a_line() -> None:
    health = Health("GPU-1", 0.5, clocks={"sm": 1e9}, throttled={"hw_slowdown": True}, xids={"79": 1})
    assert from_line(to_line("0000:4e:00.0", health)) == ("0000:4e:00.0", health)


@pytest.mark.parametrize(
    "line",
    [
        *("", "hello", "[]", '{"utilization": 1}', '{"address": "a", "colour": 1}', '{"address": "a", "moved": 7}'),
        *(f'{{"address": "a", "moved": {{"memory": {count}}}}}' for count in ("NaN", "1e400", "-1", '"7"', "0.5", "true")),
    ],
)
def test_anything_else_is_no_reading(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json has texts of its own
        from_line(line)


def test_addresses_are_of_a_bus_or_cores() -> None:
    assert on_bus("0000:4e:00.0")
    assert not any(map(on_bus, ("", "0,1,4")))
    assert (cores_of("0,1,4"), cores_of("3"), cores_of("0000:4e:00.0"), cores_of("")) == ([0, 1, 4], [3], [], [])


def test_granules_of_a_cpu_are_spelled_as_its_cores() -> None:
    assert [spelled((0, 2), "1,4,6"), spelled((2,), "1,4,6")] == ["cores 1, 6", "core 6"]
    assert [spelled((0, 2), "0000:4e:00.0"), spelled((2,), "")] == ["granules 0, 2", "granule 2"]
