"""What devices say of their state: a GPU by its driver's management library (NVML), cores by /proc.

A GPU is asked in a process of its own, `python -m partitions.cuda.health ADDRESS ...`. A call of NVML takes milliseconds, may
wait for locks of the driver that launches need too, and may never return for a GPU that is lost; there
it holds up no other work.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

INTERVAL = 2.0
"""Seconds between two readings."""


@dataclass(frozen=True, slots=True)
class Health:
    """One reading of a GPU. None, or no entry, stands for what it does not report.

    `utilization` and `memory_utilization` are parts of the time, 0 to 1. Memory is in bytes, power in watts, energy in joules
    since the driver was loaded, `temperature` in degrees Celsius, and `clocks` in hertz by name. `throttled` has the reasons
    that clocks may be low for, and whether each holds. `ecc` counts memory errors since the driver was loaded, `xids` errors
    that the driver reported (by number) since this is watched. `moved` has the bytes that it has moved since then, by path:
    `memory` (its own, read and written), `pcie_in` and `pcie_out` as the GPU sees them; `memory_bandwidth` is the most of the
    first in a second. `lost`: it does not answer on the bus any more. `missing` says what it needs to report the rest, and is
    empty where nothing is missing but what the GPU does not support.
    """

    uuid: str = ""
    utilization: float | None = None
    memory_utilization: float | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    power: float | None = None
    power_limit: float | None = None
    energy: float | None = None
    temperature: int | None = None
    clocks: Mapping[str, float] = field(default_factory=dict)
    throttled: Mapping[str, bool] = field(default_factory=dict)
    ecc: Mapping[str, int] = field(default_factory=dict)
    xids: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)
    memory_bandwidth: int | None = None
    lost: bool = False
    missing: str = ""


def command(addresses: Sequence[str]) -> list[str]:
    """The process that writes readings of the GPUs at these PCI addresses, as lines; it ends when its standard input does."""
    return [sys.executable, "-m", "partitions.cuda.health", *addresses]


def on_bus(address: str) -> bool:
    """Whether a `Device.address` is one of a bus: that of a GPU, which `command` can watch."""
    return ":" in address


def cores_of(address: str) -> list[int]:
    """The cores in a `Device.address`, in the order of granules; none for that of a GPU."""
    return [int(each) for each in address.split(",")] if address and not on_bus(address) else []


def spelled(granules: Sequence[int], address: str) -> str:
    """These granules of the device at a `Device.address`, for people: on a CPU the cores that they are."""
    cores = cores_of(address)
    named = [cores[granule] for granule in granules] if cores else granules
    return f"{'core' if cores else 'granule'}{'s' * (len(named) != 1)} {', '.join(map(str, named))}"


def to_line(address: str, health: Health) -> str:
    """A reading as a line."""
    return json.dumps({"address": address, **asdict(health)}) + "\n"


def from_line(line: bytes | str) -> tuple[str, Health]:
    """The address and the reading in a line. Raises ValueError."""
    found = json.loads(line)
    if not isinstance(found, dict) or "address" not in found:
        raise ValueError(f"{line!r} is no reading")
    try:
        address, health = found.pop("address"), Health(**found)
        wrong = [path for path, count in health.moved.items() if type(count) is not int or count < 0]
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{line!r} is no reading: {error}") from error
    if wrong:
        raise ValueError(f"{line!r} is no reading: moved: {', '.join(wrong)}: not 0 or more bytes")
    return address, health


class CoreTime(NamedTuple):
    """Seconds since this machine was started in which a core was busy, and all of them."""

    busy: float
    all: float


def core_times(root: Path = Path("/")) -> dict[int, CoreTime]:
    """Each of this host's cores by its number, by Linux. Takes 50 us on two cores. Raises OSError."""
    hertz = os.sysconf("SC_CLK_TCK")
    found = {}
    for line in (root / "proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(each) for each in numbers[:8]]  # Guests' time, after these, is counted in them as well.
            found[int(name[3:])] = CoreTime((sum(ticks) - ticks[3] - ticks[4]) / hertz, sum(ticks) / hertz)
    return found


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """The bytes of this host's memory, and of those in use. Raises OSError."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if words}
    return sizes["MemTotal:"], sizes["MemTotal:"] - sizes["MemAvailable:"]


def memory_left(root: Path = Path("/")) -> int:
    """The bytes of this host's memory that this process and its children may still take: what is available, or less where a
    control group of this process is allowed less. Raises OSError.

    Format: cgroup v2 has `memory.max` ("max": no limit) and `memory.current`, v1 `memory.limit_in_bytes` (a huge number: no
    limit) and `memory.usage_in_bytes`; the pages of files that were not used lately, in `memory.stat`, count as free
    (https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files).
    """
    total, used = host_memory(root)
    return max(0, min([total - used, *(left for group in groups(root, "memory") for left in _left_of(group))]))


def _left_of(group: Path) -> Iterator[int]:
    v2 = (group / "memory.max").is_file()
    try:
        most = (group / ("memory.max" if v2 else "memory.limit_in_bytes")).read_text().strip()
        taken = int((group / ("memory.current" if v2 else "memory.usage_in_bytes")).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return
    if most != "max":
        yield int(most) - taken + int(stat.get("inactive_file" if v2 else "total_inactive_file", 0))


def groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that limit this process by this controller, such as `cpu`: its own, and those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        if not controllers or controller in controllers.split(","):
            group = base / path.lstrip("/")
            yield from (parent for parent in (group, *group.parents) if parent.is_relative_to(base))
