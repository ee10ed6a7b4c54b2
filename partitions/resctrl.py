"""Holds cores to shares of memory bandwidth and of L3 caches by Linux's resctrl, where processor and kernel have it, and counts
what they move.

The cores of a holder are a group: a folder in /sys/fs/resctrl with them as its `cpus_list`. Whatever runs on them is in it, if
it is in no other group by itself. Its `schemata` limits what the cores under each L3 cache draw and which of its ways they fill
(what they read may be in any), whether others work or rest
(https://docs.kernel.org/filesystems/resctrl.html). Cores that are only counted are one in `mon_groups`, which has no limits.

One process makes the groups, and keeps a lock on each one's folder while it lives. A folder of ours that is not locked was left
by a process that was killed. Cores in a group of another process that lives stay there.
"""

import errno
import fcntl
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from .errors import Unsupported
from .plan import ranges

log = logging.getLogger("greenlane.fence")

_PREFIX = "greenlane-"
_TOTAL = "mbm_total_bytes"
_GONE = (errno.ENOENT, errno.ENODEV)
"""What the kernel says of a file whose group is removed before it is opened, or before it is read."""
_PATIENCE = 0.5
"""Seconds for which another program may have the lock on all groups."""


class CoreShare(NamedTuple):
    """Cores of one holder, and the most that they draw together: a part (float) of what there is, or bytes a second (int).

    None for cores that are only counted.
    """

    cores: tuple[int, ...]
    most: float | None


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


class _Ways(NamedTuple):
    """How many ways an L3 cache has, and the fewest that a group may have; `resources` are their names in `schemata`."""

    resources: tuple[str, ...]
    most: int
    least: int


class _Limit(NamedTuple):
    """What `schemata` is to have for these resources, by L3 cache, and what that means."""

    resources: tuple[str, ...]
    values: Mapping[int, str]
    words: str

    @property
    def lines(self) -> list[str]:
        values = ";".join(f"{cache}={value}" for cache, value in sorted(self.values.items()))
        return [f"{resource}:{values}" for resource in self.resources]


class _Plan(NamedTuple):
    """The limits of a holder's cores, none where they are only counted, and what there is to know."""

    limits: tuple[_Limit, ...] = ()
    cores: str = ""
    notes: tuple[str, ...] = ()

    @property
    def held(self) -> Held:
        limits = "; ".join(f"{' '.join(each.lines)}, {each.words}" for each in self.limits)
        return Held(f"{self.cores}: {limits}, by resctrl" if limits else "", self.notes)


class CoreGroups:
    """The groups of one process. All methods block, for milliseconds, and one thread at a time may call them.

    `root` is where /proc and /sys are. Nothing is raised: what cannot be done is said.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._folder = root / "sys/fs/resctrl"
        self._counting = self._folder / "mon_groups"
        self._groups: dict[str, tuple[Path, int]] = {}
        """By holder, with the descriptor that has it locked."""
        self._moved: dict[str, int] = {}
        """What each holder's cores have moved in all their groups."""
        self._read: dict[Path, int] = {}
        """What each counter has said last."""
        self.blocked = False
        """Whether the last `hold` failed as another program was in the way, so that the next one may not."""

    def look(self, shares: Mapping[str, CoreShare]) -> dict[str, Held]:
        """How `hold` would hold these shares, by holder; without other servers, one of which may be theirs. Changes nothing."""
        try:
            others = {core: group for core, group in self._others("*").items() if not group.startswith(_PREFIX)}
        except OSError as error:
            return _none(shares, str(error))
        return {name: plan.held for name, plan in self._plan(shares, others).items()}

    def hold(self, shares: Mapping[str, CoreShare]) -> dict[str, Held]:
        """Hold these shares, by holder, and no others, and count what their cores move and those of shares that are not held.

        Groups that a killed process left are removed.
        """
        self.blocked = False
        if not (self._folder / "info").is_dir():
            self.close()
            return self.look(shares)
        try:
            with self._locked():
                self._sweep()
                plans = self._plan(shares, self._others("*", f"mon_groups/{_PREFIX}*"))
                for name in [*self._groups]:
                    if name not in shares or self._holds(name) != bool(plans[name].limits):
                        self._remove(name)
                found = {
                    name: self._write(name, shares[name], plan) if plan.limits else plan.held for name, plan in plans.items()
                }
                for name, share in shares.items():  # Last, as they may get cores from groups that are held.
                    if name not in self._groups or not self._holds(name):
                        self._meter(name, share)
                return found
        except OSError as error:
            self.close()
            return _none(shares, self._explain(error))

    def moved(self) -> dict[str, int]:
        """The bytes of memory that each holder's cores have moved while they were in groups, where that is counted.

        It never falls. A counter that says nothing for now ("Unavailable") is behind until it does, and a holder of which none
        says anything, or that has no group, is left out.
        """
        return {name: self._moved[name] for name, (group, _) in self._groups.items() if self._count(name, group)}

    def close(self) -> None:
        """Hold nothing any more."""
        for name in list(self._groups):
            self._remove(name)

    def _plan(self, shares: Mapping[str, CoreShare], others: Mapping[int, str]) -> dict[str, _Plan]:
        """How each share is to be held; without limits where it cannot be, as where cores are in these groups of others."""
        found = dict.fromkeys(shares, _Plan())
        asked = {name: (cores, most) for name, (cores, most) in shares.items() if most is not None}
        try:
            self._check()
            room, masks = self._room(), self._plan_masks(asked)
        except (Unsupported, OSError, ValueError) as error:
            return found | dict.fromkeys(asked, _unfenced(str(error)))
        for name, (cores, most) in asked.items():
            try:
                if taken := self._taken(cores, others):
                    raise Unsupported(f"some of its cores are in the resctrl group {taken} of others")
                if room <= 0:
                    raise Unsupported(self._full)
                found[name] = self._plan_one(cores, most, masks.get(name))
                room -= 1
            except (Unsupported, OSError, ValueError) as error:
                found[name] = _unfenced(str(error))
        return found

    def _plan_one(self, cores: Sequence[int], most: float, mask: _Plan | None) -> _Plan:
        """Raises Unsupported where neither bandwidth nor cache can be held."""
        where = f"core{'s' * (len(cores) != 1)} {ranges(cores)}"
        try:
            unit = self._unit()
            values = {cache: str(value) for cache, value in self._limits(cores, most, unit).items()}
            plan = _Plan((_Limit(("MB",), values, unit.words),), where, tuple(self._notes(cores, most, unit)))
        except Unsupported as error:
            if not mask:
                raise
            plan = _Plan((), where, (f"of its memory_bandwidth only its part of the L3 cache is held, as {error}",))
        return plan._replace(limits=(*plan.limits, *mask.limits), notes=(*plan.notes, *mask.notes)) if mask else plan

    def _plan_masks(self, asked: Mapping[str, tuple[tuple[int, ...], float]]) -> dict[str, _Plan]:
        """The ways of each L3 cache that each holder's cores may fill: its part of them, from the lowest on, where devices do
        not write to as well; apart from the others' where all fit.
        """
        if not (ways := self._ways()):
            return {}
        found, taken = dict[str, _Plan](), Counter[int]()
        for name, (cores, most) in asked.items():
            masks, notes = dict[int, str](), list[str]()
            with suppress(Unsupported, OSError, ValueError):  # It is in no L3 cache, and cannot be held at all.
                for cache in dict.fromkeys(map(self._cache_of, cores)):
                    part = self._part_of(cache, cores) if isinstance(most, int) else most
                    width = min(ways.most, max(ways.least, int(part * ways.most + 1e-9)))
                    first = min(taken[cache], ways.most - width)
                    if width > part * ways.most + 1e-9:
                        text = "its part of the L3 cache is {:.3g}, and this processor gives {} of {} ways at least"
                        notes.append(text.format(part, width, ways.most))
                    if first < taken[cache]:
                        notes.append("it has ways of the L3 cache that another held tenant has, as there are too few")
                    taken[cache], masks[cache] = first + width, f"{((1 << width) - 1) << first:x}"
                limit = _Limit(ways.resources, masks, f"a mask of {ways.most} ways")
                found[name] = _Plan((limit,), notes=tuple(dict.fromkeys(notes)))
        return found

    def _ways(self) -> _Ways | None:
        """None where caches are not divided."""
        about = self._folder / "info"
        resources = tuple(name for name in ("L3", "L3CODE", "L3DATA") if (about / name / "cbm_mask").is_file())
        if not resources:
            return None
        mask, least = ((about / resources[0] / name).read_text() for name in ("cbm_mask", "min_cbm_bits"))
        return _Ways(resources, int(mask, 16).bit_length(), max(1, int(least)))

    def _check(self) -> None:
        """Raises Unsupported where nothing can be held, with what to do."""
        if not self._folder.is_dir():
            raise Unsupported("this processor, kernel or virtual machine has no resctrl")
        if not (self._folder / "info").is_dir():
            raise Unsupported(f"resctrl is not mounted; have root call: mount -t resctrl resctrl {self._folder}")
        if ours := self._ours("res"):
            raise Unsupported(f"this server was put into the resctrl group {ours}; start it outside of that")
        if not os.access(self._folder, os.W_OK, effective_ids=True):
            folders = f"{self._folder} {self._counting}" if self._counting.is_dir() else f"{self._folder}"
            raise Unsupported(
                f"this user may not make groups in {self._folder}, or it is read-only here; have root call: "
                f"chown {os.geteuid()} {folders} && chmod u+w {folders}"
            )

    def _unit(self) -> _Unit:
        """Raises Unsupported where bandwidth cannot be held."""
        about = self._folder / "info/MB"
        if not about.is_dir():
            raise Unsupported(f"this processor does not limit memory bandwidth ({about} is not there)")
        mounts = [line.split() for line in (self._root / "proc/self/mounts").read_text().splitlines()]
        if any("mba_MBps" in mount[3].split(",") for mount in mounts):
            return _Unit("MiB/s for each L3 cache", 1 << 20)
        least, step = (int((about / name).read_text()) for name in ("min_bandwidth", "bandwidth_gran"))
        if any(each in (self._root / "proc/cpuinfo").read_text() for each in ("AuthenticAMD", "HygonGenuine")):
            return _Unit("eighths of a GB/s for each L3 cache", 125_000_000, max(1, least), step)
        return _Unit("% of each L3 cache's memory bandwidth", 0, least, step)

    def _limits(self, cores: Sequence[int], most: float, unit: _Unit) -> dict[int, int]:
        """A number for each L3 cache under which there are cores of a holder. Raises Unsupported."""
        if isinstance(most, int) and not unit.size:
            instead = "give a part, such as 0.4, or mount resctrl with -o mba_MBps"
            raise Unsupported(f"it is a rate, {most / 1e9:.4g} GB/s, and resctrl takes parts here ({unit.words}); {instead}")
        if not isinstance(most, int) and unit.size:
            asked, instead = f"{most:.3g}", 'give a rate, such as "20GB/s"'
            raise Unsupported(f"it is a part, {asked}, and resctrl takes rates here ({unit.words}); {instead}")
        limits = {}
        for cache, count in Counter(map(self._cache_of, cores)).items():
            exact = most * count / len(cores) / unit.size if unit.size else most * 100
            steps = int(exact + 1e-9 - unit.least) // unit.step  # Or the kernel would round up.
            limits[cache] = unit.least + max(0, steps) * unit.step
        return limits

    def _notes(self, cores: Sequence[int], most: float, unit: _Unit) -> Iterator[str]:
        if not unit.size and most * 100 < unit.least:
            yield f"its memory_bandwidth is {most:.3g}, and this processor holds cores to {unit.least} % at least"
        mode = self._folder / "info/MB/thread_throttle_mode"
        if mode.is_file() and mode.read_text().strip() == "max":
            files = (self._cpu(core) / "topology/thread_siblings_list" for core in cores)
            if others := {core for file in files for core in _numbers(file.read_text())} - {*cores}:
                yield f"cores {ranges(sorted(others))} are held with them, as they are threads of the same physical cores"

    def _room(self) -> int:
        """How many groups there may be besides those of others, and the default one."""
        return self._most - 1 - sum(not group.name.startswith(_PREFIX) for group in self._all())

    def _ours(self, kind: str) -> str:
        """The group that this server was put into, "res" or "mon": the kernel goes by that, whatever core it is on."""
        with suppress(OSError):  # Not in every kernel.
            for line in (self._root / "proc/self/cpu_resctrl_groups").read_text().splitlines():
                if line.startswith(f"{kind}:"):
                    return line.removeprefix(f"{kind}:").strip("/")
        return ""

    def _others(self, *where: str) -> dict[int, str]:
        """The cores that others have put into groups of theirs, which are at these patterns."""
        found, ours = dict[int, str](), {group for group, _ in self._groups.values()}
        for file in (file for each in where for file in self._folder.glob(f"{each}/cpus_list") if file.parent not in ours):
            try:
                found |= dict.fromkeys(_numbers(file.read_text()), file.parent.name)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
        return found

    def _taken(self, cores: Iterable[int], others: Mapping[int, str]) -> str:
        """The groups of others that have some of these cores. Those of another server go when that ends."""
        groups = sorted({group for core in cores if (group := others.get(core))})
        self.blocked |= any(each.startswith(_PREFIX) for each in groups)
        return ", ".join(groups)

    def _all(self) -> list[Path]:
        return [each.parent for each in self._folder.glob("*/schemata")]

    def _cache_of(self, core: int) -> int:
        """The number of the L3 cache that a core has. Raises Unsupported."""
        return int((self._cache(core) / "id").read_text())

    def _part_of(self, cache: int, cores: Sequence[int]) -> float:
        """How many of the cores that share an L3 cache are among these, from 0 to 1."""
        theirs = [core for core in cores if self._cache_of(core) == cache]
        return len(theirs) / len([*_numbers((self._cache(theirs[0]) / "shared_cpu_list").read_text())])

    def _cache(self, core: int) -> Path:
        for level in self._cpu(core).glob("cache/index*/level"):
            if level.read_text().strip() == "3":
                return level.parent
        raise Unsupported(f"core {core} has no L3 cache, by which bandwidth is limited")

    def _cpu(self, core: int) -> Path:
        return self._root / f"sys/devices/system/cpu/cpu{core}"

    def _write(self, name: str, share: CoreShare, plan: _Plan) -> Held:
        try:
            group = self._open(name, self._folder)
            (group / "schemata").write_text("".join(f"{line}\n" for limit in plan.limits for line in limit.lines))
            (group / "cpus_list").write_text(_list(share.cores))
            return plan.held
        except OSError as error:
            why = self._explain(error)
            self._remove(name)
        if len(plan.limits) > 1:  # Ways may be another group's alone.
            note = f"its part of the L3 cache is not held, as {why}"
            return self._write(name, share, plan._replace(limits=plan.limits[:1], notes=(*plan.notes, note)))
        return _unfenced(why).held

    def _meter(self, name: str, share: CoreShare) -> None:
        """Count what cores move that are not held, if the kernel can, may, and others do not."""
        events = self._folder / "info/L3_MON/mon_features"
        try:
            others = self._others("*", "mon_groups/*")
            if _TOTAL in events.read_text().split() and not self._taken(share.cores, others):
                (self._open(name, self._counting) / "cpus_list").write_text(_list(share.cores))
                return
        except OSError as error:
            log.debug("what the cores of %s move is not counted: %s", name, error)
        if name in self._groups:
            self._remove(name)

    def _holds(self, name: str) -> bool:
        """Whether a holder's group limits its cores."""
        return self._groups[name][0].parent == self._folder

    def _open(self, name: str, where: Path) -> Path:
        """A holder's group, a new one if there is none or it was removed. Raises OSError."""
        if name in self._groups and not self._groups[name][0].is_dir():
            self._remove(name)
        if name not in self._groups:
            group = where / f"{_PREFIX}{name}-{secrets.token_hex(3)}"
            group.mkdir()
            self._groups[name] = group, _lock(group)
        return self._groups[name][0]

    def _remove(self, name: str) -> None:
        if group := self._groups.pop(name, None):
            self._count(name, group[0])
            self._read = {file: count for file, count in self._read.items() if group[0] not in file.parents}
            _remove(*group)

    def _count(self, name: str, group: Path) -> bool:
        """Add what was moved since the last time. False if no counter says it."""
        if self._ours("mon"):  # What this server moves is counted there.
            return False
        said = False
        for file in group.glob(f"mon_data/mon_L3_*/{_TOTAL}"):
            with suppress(OSError, ValueError):  # "Unavailable", "Error" or "Unassigned", for now.
                before, now = self._read.get(file, 0), int(file.read_text())
                self._read[file], said = now, True
                self._moved[name] = self._moved.get(name, 0) + (now - before if now >= before else now)  # Or it began at 0.
        return said

    def _sweep(self) -> None:
        """Remove what a process has left that was killed."""
        for group in [*self._folder.glob(f"{_PREFIX}*"), *self._counting.glob(f"{_PREFIX}*")]:
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
        self.blocked |= error.errno in (errno.EWOULDBLOCK, errno.EBUSY, errno.ENOSPC)
        if isinstance(error, BlockingIOError):
            return f"another program has {self._folder} locked (flock) for {_PATIENCE:g} s"
        status = "ok"
        with suppress(OSError):
            status = (self._folder / "info/last_cmd_status").read_text().strip()
        what = self._full if "CLOSID" in status else str(error)
        return what if status == "ok" else f"{what} ({status})"


def _unfenced(why: str) -> _Plan:
    return _Plan(notes=(f"unfenced: its memory_bandwidth holds nothing back, as {why}",))


def _none(shares: Mapping[str, CoreShare], why: str) -> dict[str, Held]:
    """None of these shares is held."""
    return {name: Held() if share.most is None else _unfenced(why).held for name, share in shares.items()}


def _list(cores: Iterable[int]) -> str:
    return ",".join(map(str, cores)) + "\n"


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
