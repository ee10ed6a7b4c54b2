"""A folder that behaves as Linux's resctrl, by the kernel's documentation: https://docs.kernel.org/filesystems/resctrl.html

All state is in the folder itself, as the kernel's is in its files. A path of it is a `KernelPath`, whose `mkdir`, `rmdir` and
`write_text` do what the kernel does for such a call, and set `last_cmd_status`; other processes see the folder as it is then.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import PosixPath
from typing import Any

MOST = 100
"""The largest percentage, as of Intel's processors."""


class KernelPath(PosixPath):
    """A path below a root with a `sys/fs/resctrl`; elsewhere it is an ordinary one."""

    @property
    def _base(self) -> "KernelPath | None":
        return next((each for each in (self, *self.parents) if each.parts[-3:] == ("sys", "fs", "resctrl")), None)

    @property
    def _is_group(self) -> bool:
        return self.parent == self._base and self.name not in ("info", "mon_data", "mon_groups")

    @property
    def _is_meter(self) -> bool:
        """Whether it is a group of the default one that only counts."""
        return self._base is not None and self.parent == self._base / "mon_groups"

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        base = self._base
        if base is None or not (self._is_group or self._is_meter) or not (base / "info").is_dir():
            super().mkdir(mode, parents, exist_ok)
            return
        if "\n" in self.name:
            _fail(base, errno.EINVAL, "name contains a newline")
        if self._is_group:
            most = min(int(file.read_text()) for file in (base / "info").glob("*/num_closids"))
            if 1 + len(groups(base)) >= most:
                _fail(base, errno.ENOSPC, "Out of CLOSIDs")
        counted = PosixPath(base / "info/L3_MON").is_dir()
        if counted and 1 + len(groups(base)) + len(meters(base)) >= int((base / "info/L3_MON/num_rmids").read_text()):
            # What was used last is free when little of what it counted is in the cache any more.
            _fail(base, errno.EBUSY if (base / "limbo").exists() else errno.ENOSPC, "Out of RMIDs")
        super().mkdir(mode)
        for name in ("cpus_list", "tasks"):
            PosixPath(self / name).write_text("")
        if self._is_group:
            PosixPath(self / "mode").write_text("shareable\n")
            PosixPath(self / "schemata").write_text(PosixPath(base / "info/defaults").read_text())
        for domain in base.glob("mon_data/mon_L3_*"):
            there = PosixPath(self / "mon_data" / domain.name)
            there.mkdir(parents=True)
            (there / "mbm_total_bytes").write_text("0\n")
        _succeed(base)

    def rmdir(self) -> None:
        base = self._base
        if base is None or not (self._is_group or self._is_meter):
            super().rmdir()
            return
        if not self.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        freed = cpus(self)
        shutil.rmtree(self)
        _set_cpus(base, cpus(base) | freed)
        _succeed(base)

    def write_text(self, data: str, *args: Any, **options: Any) -> int:
        base = self._base
        if base is None or self.name not in ("schemata", "cpus_list"):
            return super().write_text(data, *args, **options)
        if not self.exists():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        if self.name == "schemata":
            self._write_schemata(base, data)
        else:
            self._write_cpus(base, data)
        _succeed(base)
        return len(data)

    def _write_schemata(self, base: "KernelPath", data: str) -> None:
        if not data.endswith("\n"):
            _fail(base, errno.EINVAL, "ok")
        found = {name: schemata(self.parent, name) for name in resources(base)}
        for line in data.removesuffix("\n").split("\n"):
            name, colon, values = line.partition(":")
            if not colon:
                _fail(base, errno.EINVAL, "Missing ':'")
            if name not in found:
                _fail(base, errno.EINVAL, f"Unknown or unsupported resource name '{name}'")
            for each in values.split(";"):
                domain, value = each.split("=")
                if int(domain) not in found[name]:
                    _fail(base, errno.EINVAL, "ok")  # The kernel says nothing of it.
                check = self._bandwidth if name == "MB" else self._mask
                found[name][int(domain)] = check(base, name, int(domain), value)
        _set_schemata(self, found)  # All of it, or nothing.

    def _bandwidth(self, base: "KernelPath", name: str, domain: int, text: str) -> int:
        least, step = (int((base / "info/MB" / each).read_text()) for each in ("min_bandwidth", "bandwidth_gran"))
        most, value = max(MOST, *schemata(base).values()), int(text)
        if not least <= value <= most:
            _fail(base, errno.EINVAL, f"MB value {value} out of range [{least},{most}]")
        return -(-value // step) * step

    def _mask(self, base: "KernelPath", name: str, domain: int, text: str) -> int:
        """As the kernel does for a processor without `sparse_masks`."""
        all_ways, least = (int((base / "info" / name / each).read_text(), 16) for each in ("cbm_mask", "min_cbm_bits"))
        value = int(text, 16)
        if not 0 < value <= all_ways:
            _fail(base, errno.EINVAL, "Mask out of range")
        if "0" in f"{value:b}".strip("0"):
            _fail(base, errno.EINVAL, f"The mask {value:x} has non-consecutive 1-bits")
        if value.bit_count() < least:
            _fail(base, errno.EINVAL, f"Need at least {least} bits in the mask")
        for group in groups(base):
            alone = (group / "mode").read_text().strip() == "exclusive"
            if alone and group != self.parent and schemata(group, name)[domain] & value:
                _fail(base, errno.EINVAL, "Overlaps with exclusive group")
        return value

    def _write_cpus(self, base: "KernelPath", data: str) -> None:
        try:
            asked = set(numbers(data))
        except ValueError:
            _fail(base, errno.EINVAL, "Bad CPU list/mask")
        online = {int(each.name[3:]) for each in base.parent.parent.glob("devices/system/cpu/cpu[0-9]*")}
        if not asked <= online:
            _fail(base, errno.EINVAL, "Can only assign online CPUs")
        before = cpus(self.parent)
        if self.parent.parent.name == "mon_groups":
            if not asked <= cpus(base):
                _fail(base, errno.EINVAL, "Can only add CPUs to mongroup that belong to parent")
            for group in meters(base):
                _set_cpus(group, cpus(group) - asked)
            _set_cpus(self.parent, asked)
            return
        if self.parent == base and before - asked:
            _fail(base, errno.EINVAL, "Can't drop CPUs from default group")
        _set_cpus(base, (cpus(base) | (before - asked)) - asked)
        for group in groups(base):
            _set_cpus(group, cpus(group) - asked)
        _set_cpus(self.parent, asked)
        for group in meters(base):
            _set_cpus(group, cpus(group) & cpus(base))


def lay_out(
    root: "KernelPath",
    cores: int,
    closids: int = 8,
    domains: int = 1,
    default: int = MOST,
    ways: int = 0,
    caches: Iterable[str] = ("L3",),
) -> KernelPath:
    """Make the folder for a machine with so many cores, each half a physical one, under so many L3 caches; where it is.

    Without a `default` bandwidth is not limited, and without `ways` caches are not divided; `caches` are L3CODE and L3DATA
    when it is mounted with cdp.
    """
    base = PosixPath(root) / "sys/fs/resctrl"
    for core in range(cores):
        cache = PosixPath(root) / f"sys/devices/system/cpu/cpu{core}/cache/index3"
        number, there = core * domains // cores, -(-cores // domains)
        _write(cache, {"level": "3", "id": str(number), "shared_cpu_list": f"{number * there}-{(number + 1) * there - 1}"})
        _write(cache.parent.parent / "topology", {"thread_siblings_list": f"{core // 2 * 2}-{core // 2 * 2 + 1}"})
    _write(PosixPath(root) / "proc", {"cpuinfo": "vendor_id\t: GenuineIntel"})
    _write(
        PosixPath(root) / "proc/self",
        {"mounts": f"resctrl {base} resctrl rw,relatime 0 0", "cpu_resctrl_groups": "res:/\nmon:"},
    )
    defaults = ["MB:" + ";".join(f"{each}={default}" for each in range(domains))] if default else []
    for name in caches if ways else ():
        _write(base / "info" / name, {"num_closids": str(closids), "cbm_mask": f"{(1 << ways) - 1:x}", "min_cbm_bits": "1"})
        defaults.append(f"{name}:" + ";".join(f"{each}={(1 << ways) - 1:x}" for each in range(domains)))
    _write(base / "info", {"last_cmd_status": "ok", "defaults": "\n".join(defaults)})
    about = {"num_closids": closids, "min_bandwidth": 10, "bandwidth_gran": 10, "thread_throttle_mode": "per-thread"}
    if default:
        _write(base / "info/MB", {name: str(each) for name, each in about.items()})
    _write(base / "info/L2", {"num_closids": str(closids + 8)})
    _write(base / "info/L3_MON", {"mon_features": "llc_occupancy\nmbm_total_bytes", "num_rmids": "256"})
    for each in range(domains):
        _write(base / f"mon_data/mon_L3_{each:02}", {"mbm_total_bytes": "0"})
    (base / "mon_groups").mkdir()
    _write(base, {"cpus_list": f"0-{cores - 1}", "schemata": (base / "info/defaults").read_text(), "tasks": "1"})
    return KernelPath(base)


def groups(base: PosixPath) -> list[PosixPath]:
    """All groups that limit something but the default one."""
    return [each.parent for each in base.glob("*/cpus_list")]


def meters(base: PosixPath) -> list[PosixPath]:
    """The groups of the default one that only count."""
    return [each.parent for each in base.glob("mon_groups/*/cpus_list")]


def cpus(group: PosixPath) -> set[int]:
    """The cores of a group."""
    return set(numbers((group / "cpus_list").read_text()))


def resources(group: PosixPath) -> list[str]:
    """What its `schemata` limits."""
    return [line.partition(":")[0].strip() for line in (group / "schemata").read_text().split("\n") if line]


def schemata(group: PosixPath, resource: str = "MB") -> dict[int, int]:
    """What a group has of each L3 cache."""
    for line in (group / "schemata").read_text().splitlines():
        name, _, values = line.strip().partition(":")
        if name == resource:
            pairs = (each.split("=") for each in values.split(";"))
            return {int(domain): int(value, 10 if name == "MB" else 16) for domain, value in pairs}
    raise KeyError(resource)


def numbers(text: str) -> Iterable[int]:
    """Those in a list such as "0-3,8". Raises ValueError."""
    for each in filter(None, text.strip().split(",")):
        first, _, last = each.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _set_schemata(file: PosixPath, found: dict[str, dict[int, int]]) -> None:
    lines = (
        f"{name:>6}:"
        + ";".join(f"{domain}={value:4}" if name == "MB" else f"{domain}={value:x}" for domain, value in each.items())
        for name, each in found.items()
    )
    PosixPath(file).write_text("".join(f"{line}\n" for line in lines))


def _set_cpus(group: PosixPath, cores: Iterable[int]) -> None:
    PosixPath(group / "cpus_list").write_text(",".join(map(str, sorted(cores))) + "\n")


def _succeed(base: PosixPath) -> None:
    PosixPath(base / "info/last_cmd_status").write_text("ok\n")


def _fail(base: PosixPath, number: int, status: str) -> None:
    PosixPath(base / "info/last_cmd_status").write_text(f"{status}\n")
    raise OSError(number, os.strerror(number))


def _write(folder: PosixPath, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
