"""Holds cores to shares of memory bandwidth by Linux's resctrl, where processor and kernel have it, and counts what they move.

The cores of a holder are a group: a folder in /sys/fs/resctrl with them as its `cpus_list`. Whatever runs on them is in it, if
it is in no other group by itself. Its `schemata` limits what the cores under each L3 cache draw, whether others work or rest
(https://docs.kernel.org/filesystems/resctrl.html).

One process makes the groups, and keeps a lock on each one's folder while it lives. A folder of ours that is not locked was left
by a process that was killed.
"""

import errno
import fcntl
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from .errors import Unsupported
from .plan import ranges

log = logging.getLogger("greenlane.fence")

_PREFIX = "greenlane-"
_PATIENCE = 2.0
"""Seconds for which another program may have the lock on all groups."""


class CoreShare(NamedTuple):
    """Cores of one holder, and the most that they draw together: a part (float) of what there is, or bytes a second (int)."""

    cores: tuple[int, ...]
    most: float


class Held(NamedTuple):
    """How cores are held, "" if they are not; `notes` say why not, or what else there is to know."""

    how: str = ""
    notes: tuple[str, ...] = ()


class _Unit(NamedTuple):
    """What numbers in `schemata` are: `size` bytes a second, or percents if that is 0. The smallest, and their steps."""

    words: str
    size: int = 0
    least: int = 1
    step: int = 1


class CoreGroups:
    """The groups of one process. All methods block, for milliseconds, and one thread at a time may call them.

    `root` is where /proc and /sys are. Nothing is raised: what cannot be done is said.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._folder = root / "sys/fs/resctrl"
        self._groups: dict[str, tuple[Path, int]] = {}
        """By holder, with the descriptor that has it locked."""

    def look(self, shares: Mapping[str, CoreShare]) -> dict[str, Held]:
        """How `hold` would hold these shares, by holder. Changes nothing."""
        return {name: held for name, (_, held) in self._plan(shares).items()}

    def hold(self, shares: Mapping[str, CoreShare]) -> dict[str, Held]:
        """Hold these shares, by holder, and no others; groups that a killed process left are removed."""
        plan = self._plan(shares)
        for name in [name for name in self._groups if not plan.get(name, ({},))[0]]:
            self._remove(name)
        if not (self._folder / "info").is_dir():
            return {name: held for name, (_, held) in plan.items()}
        try:
            with self._locked():
                self._sweep()
                return {name: self._write(name, shares[name], *each) if each[0] else each[1] for name, each in plan.items()}
        except OSError as error:
            self.close()
            return {name: _unfenced(self._explain(error)) for name in shares}

    def moved(self) -> dict[str, int]:
        """The bytes of memory that each holder's cores have moved since they are held, where they are counted."""
        found = {}
        for name, (group, _) in self._groups.items():
            files = list(group.glob("mon_data/mon_L3_*/mbm_total_bytes"))
            with suppress(OSError, ValueError):  # "Unavailable", for now.
                found.update({name: sum(int(file.read_text()) for file in files)} if files else {})
        return found

    def close(self) -> None:
        """Hold nothing any more."""
        for name in list(self._groups):
            self._remove(name)

    def _plan(self, shares: Mapping[str, CoreShare]) -> dict[str, tuple[dict[int, int], Held]]:
        """What to write for each share, by L3 cache, and how it is held then; nothing to write where it cannot be."""
        found: dict[str, tuple[dict[int, int], Held]] = {}
        try:
            unit, others, room = self._unit(), self._others(), self._room()
        except (Unsupported, OSError, ValueError) as error:
            return {name: ({}, _unfenced(str(error))) for name in shares}
        for name, share in shares.items():
            try:
                if taken := {group for core in share.cores if (group := others.get(core))}:
                    raise Unsupported(f"some of its cores are in the resctrl group {', '.join(sorted(taken))} of others")
                if room <= 0:
                    raise Unsupported(self._full)
                limits, notes = self._limits(share, unit), tuple(self._notes(share, unit))
                cores = f"core{'s' * (len(share.cores) != 1)} {ranges(share.cores)}"
                found[name] = limits, Held(f"{cores}: {_line(limits)}, {unit.words}, by resctrl", notes)
                room -= 1
            except (Unsupported, OSError, ValueError) as error:
                found[name] = {}, _unfenced(str(error))
        return found

    def _unit(self) -> _Unit:
        """Raises Unsupported where nothing can be held, with what to do."""
        if not self._folder.is_dir():
            raise Unsupported("this processor, kernel or virtual machine has no resctrl")
        if not (self._folder / "info").is_dir():
            raise Unsupported(f"resctrl is not mounted; have root call: mount -t resctrl resctrl {self._folder}")
        about = self._folder / "info/MB"
        if not about.is_dir():
            raise Unsupported(f"this processor does not limit memory bandwidth ({about} is not there)")
        with suppress(OSError):  # Not in every kernel.
            ours = (self._root / "proc/self/cpu_resctrl_groups").read_text().partition("\n")[0].removeprefix("res:")
            if ours not in ("", "/"):
                raise Unsupported(f"this server was put into the resctrl group {ours}; start it outside of that")
        if not os.access(self._folder, os.W_OK, effective_ids=True):
            raise Unsupported(
                f"this user may not make groups in {self._folder}, or it is read-only here; have root call: "
                f"chown {os.geteuid()} {self._folder} && chmod u+w {self._folder}"
            )
        mounts = [line.split() for line in (self._root / "proc/self/mounts").read_text().splitlines()]
        if any("mba_MBps" in mount[3].split(",") for mount in mounts):
            return _Unit("MiB/s for each L3 cache", 1 << 20)
        least, step = (int((about / name).read_text()) for name in ("min_bandwidth", "bandwidth_gran"))
        if any(each in (self._root / "proc/cpuinfo").read_text() for each in ("AuthenticAMD", "HygonGenuine")):
            return _Unit("eighths of a GB/s for each L3 cache", 125_000_000, max(1, least), step)
        return _Unit("% of each L3 cache's memory bandwidth", 0, least, step)

    def _limits(self, share: CoreShare, unit: _Unit) -> dict[int, int]:
        """A number for each L3 cache under which there are cores of a share. Raises Unsupported."""
        if isinstance(share.most, int) and not unit.size:
            instead = "give a part, such as 0.4, or mount resctrl with -o mba_MBps"
            raise Unsupported(
                f"it is a rate, {share.most / 1e9:.4g} GB/s, and resctrl takes parts here ({unit.words}); {instead}"
            )
        if not isinstance(share.most, int) and unit.size:
            asked, instead = f"{share.most:.3g}", 'give a rate, such as "20GB/s"'
            raise Unsupported(f"it is a part, {asked}, and resctrl takes rates here ({unit.words}); {instead}")
        limits = {}
        for cache, count in Counter(map(self._cache_of, share.cores)).items():
            exact = share.most * count / len(share.cores) / unit.size if unit.size else share.most * 100
            steps = int(exact + 1e-9 - unit.least) // unit.step  # Or the kernel would round up.
            limits[cache] = unit.least + max(0, steps) * unit.step
        return limits

    def _notes(self, share: CoreShare, unit: _Unit) -> Iterator[str]:
        if not unit.size and share.most * 100 < unit.least:
            yield f"its memory_bandwidth is {share.most:.3g}, and this processor holds cores to {unit.least} % at least"
        mode = self._folder / "info/MB/thread_throttle_mode"
        if mode.is_file() and mode.read_text().strip() == "max":
            files = (self._cpu(core) / "topology/thread_siblings_list" for core in share.cores)
            if others := {core for file in files for core in _numbers(file.read_text())} - {*share.cores}:
                yield f"cores {ranges(sorted(others))} are held with them, as they are threads of the same physical cores"

    def _room(self) -> int:
        """How many groups there may be besides those of others, and the default one."""
        return self._most - 1 - sum(not group.name.startswith(_PREFIX) for group in self._all())

    def _others(self) -> dict[int, str]:
        """The cores that others have put into groups of theirs."""
        found = dict[int, str]()
        for group in self._all():
            with suppress(FileNotFoundError):  # It was removed meanwhile.
                if not group.name.startswith(_PREFIX):
                    found |= dict.fromkeys(_numbers((group / "cpus_list").read_text()), group.name)
        return found

    def _all(self) -> list[Path]:
        return [each.parent for each in self._folder.glob("*/schemata")]

    def _cache_of(self, core: int) -> int:
        """The number of the L3 cache that a core has."""
        for level in self._cpu(core).glob("cache/index*/level"):
            if level.read_text().strip() == "3":
                return int((level.parent / "id").read_text())
        raise Unsupported(f"core {core} has no L3 cache, by which bandwidth is limited")

    def _cpu(self, core: int) -> Path:
        return self._root / f"sys/devices/system/cpu/cpu{core}"

    def _write(self, name: str, share: CoreShare, limits: dict[int, int], held: Held) -> Held:
        try:
            group = self._open(name)
            (group / "schemata").write_text(_line(limits) + "\n")
            (group / "cpus_list").write_text(",".join(map(str, share.cores)) + "\n")
            return held
        except OSError as error:
            why = self._explain(error)
            self._remove(name)
            return _unfenced(why)

    def _open(self, name: str) -> Path:
        """A holder's group, a new one if there is none or it was removed. Raises OSError."""
        if name in self._groups and not self._groups[name][0].is_dir():
            self._remove(name)
        if name not in self._groups:
            group = self._folder / f"{_PREFIX}{name}-{secrets.token_hex(3)}"
            group.mkdir()
            self._groups[name] = group, _lock(group)
        return self._groups[name][0]

    def _remove(self, name: str) -> None:
        if group := self._groups.pop(name, None):
            _remove(*group)

    def _sweep(self) -> None:
        """Remove what a process has left that was killed."""
        for group in [group for group in self._all() if group.name.startswith(_PREFIX)]:
            with suppress(BlockingIOError, FileNotFoundError):  # It lives, or is this process; or it was removed meanwhile.
                _remove(group, _lock(group))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """With the lock on all groups that programs are to take by the kernel's documentation. Raises OSError."""
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                lock = _lock(self._folder)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        try:
            yield
        finally:
            os.close(lock)

    @property
    def _most(self) -> int:
        """How many groups there may be."""
        return min(int(file.read_text()) for file in (self._folder / "info").glob("*/num_closids"))

    @property
    def _full(self) -> str:
        return f"the {self._most} groups that this processor can have, the default one included, are in use; hold fewer tenants"

    def _explain(self, error: OSError) -> str:
        if isinstance(error, BlockingIOError):
            return f"another program has {self._folder} locked (flock) for {_PATIENCE:g} s"
        what, status = self._full if error.errno == errno.ENOSPC else str(error), "ok"
        with suppress(OSError):
            status = (self._folder / "info/last_cmd_status").read_text().strip()
        return what if status == "ok" else f"{what} ({status})"


def _unfenced(why: str) -> Held:
    return Held("", (f"unfenced: its memory_bandwidth holds nothing back, as {why}",))


def _line(limits: Mapping[int, int]) -> str:
    return "MB:" + ";".join(f"{cache}={limit}" for cache, limit in sorted(limits.items()))


def _numbers(text: str) -> Iterable[int]:
    """Those in a list such as "0-3,8"."""
    for each in filter(None, text.strip().split(",")):
        first, _, last = each.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _lock(folder: Path) -> int:
    """A descriptor that has a folder locked. Raises BlockingIOError if another one has, and OSError."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove(group: Path, lock: int) -> None:
    try:
        group.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("resctrl group %s stays, and holds its cores: %s; have root call: rmdir %s", group.name, error, group)
    finally:
        os.close(lock)
