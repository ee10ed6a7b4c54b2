"""What was used as CSV files, one for each day in UTC: `usage-2026-11-22.csv`.

Each row is a period of a minute or less, and each figure is in one row only, so that a column can be summed: a row without a
model has what a tenant was granted, idle and lent, one with a model what that used and borrowed, and one without a tenant what
no tenant was granted. Seconds have nine places, so that sums are exact.
"""

import asyncio
import logging
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from partitions.regular_file import open_regular

from ..accounts.usage import NOTHING, NS, Moved, Totals
from ..host.log_writer import MODE

log = logging.getLogger("greenlane.control")

COLUMNS = (
    "from,to,device,unit,tenant,model,version,granted,idle,lent,used,borrowed,works,energy_joules,"
    "memory_bytes,pcie_in_bytes,pcie_out_bytes,moved_by"
)
"""New ones come last. A file with other columns, of another version, is left as it is, and another one begun for that day."""
PERIOD = 60 * NS
_LATE = 60.0
"""Seconds after which the log says that rows have not been written, as by a disk in the network that hangs."""


class UsageFiles:
    """The files of one directory. Belongs to the event loop, and writes on another thread, one call at a time.

    Rows that cannot be written are not lost: the next ones are for a longer period.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: Totals | None = None
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failing = False

    def begin(self, totals: Totals) -> asyncio.Task[None]:
        """The first period begins now. The file is made, so that the log says at once that it cannot be."""
        self._written = totals
        return self.begin_writing(totals)

    def due(self, totals: Totals) -> bool:
        """Whether a period has ended, a minute of the clock, and so also a day, and no other is being written."""
        return not self._tasks and (self._written is None or totals.wall // PERIOD != self._written.wall // PERIOD)

    async def write(self, totals: Totals) -> None:
        """As `begin_writing`, and wait for that. It goes on where the caller is cancelled, so that nothing is written twice."""
        await asyncio.shield(self.begin_writing(totals))

    def begin_writing(self, totals: Totals) -> asyncio.Task[None]:
        """Append the rows of the period since the last call, to the file of the day in which that began. Raises nothing."""
        task = asyncio.create_task(self._write(totals))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _write(self, totals: Totals) -> None:
        async with self._writing:
            before = self._written
            if before is None or totals.at < before.at:
                return
            text = "".join(f"{row}\n" for row in rows(before, totals)) if totals.at > before.at else ""
            path = self._directory / f"usage-{_time(before.wall)[:10]}.csv"
            late = asyncio.get_running_loop().call_later(
                _LATE, log.error, "%s: what was used has not been written for %g s", path, _LATE
            )
            try:
                await asyncio.to_thread(_append, path, text)
            except OSError as error:
                if not self._failing:
                    log.error("%s: what was used is not written, but kept for the next attempt: %s", path, error)
                self._failing = True
            else:
                if self._failing:
                    log.warning("%s: what was used is written again", path)
                self._failing, self._written = False, totals
            finally:
                late.cancel()


def rows(before: Totals, now: Totals) -> Iterator[str]:
    """The rows of one period, without line ends."""
    added = now.less(before)
    for name, device in added.devices.items():
        start = f"{_time(before.wall)},{_time(now.wall)},{_quoted(name)},{device.unit}"
        free_energy = "" if device.energy is None else _micro(device.idle_energy)
        moved = _moved(None if device.moved is None else device.background, device.estimated)
        yield f"{start},,,,{_seconds(device.free)},,,,,,{free_energy},{moved}"
        for tenant, theirs in device.tenants.items():
            if theirs.granted or theirs.idle or theirs.lent or any(theirs.rest):  # Else it has gone.
                figures = f"{_seconds(theirs.granted)},{_seconds(theirs.idle)},{_seconds(theirs.lent)}"
                rest = _moved(theirs.rest if any(theirs.rest) else None)
                yield f"{start},{_quoted(tenant)},,,{figures},,,,,{rest}"
            for model, each in theirs.models.items():
                if each.works or each.used or each.borrowed or any(each.moved):
                    title, _, version = model.rpartition("/")
                    energy = "" if device.energy is None else _micro(each.energy)
                    moved = _moved(None if theirs.moved is None else each.moved, each.estimated)
                    figures = f"{_seconds(each.used)},{_seconds(each.borrowed)},{each.works},{energy},{moved}"
                    yield f"{start},{_quoted(tenant)},{_quoted(title)},{_quoted(version)},,,,{figures}"


def _moved(moved: Moved | None, estimated: Moved = NOTHING) -> str:
    if moved is None:
        return ",,,"
    return f"{moved.memory},{moved.pcie_in},{moved.pcie_out},{'estimated' if moved.has_much(estimated) else 'measured'}"


def _append(path: Path, text: str) -> None:
    """All of it or nothing, also where the disk is full. Blocks. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not _begins_like(path):
        path = path.with_stem(f"{path.stem}-{len(COLUMNS.split(','))}")
        if path.exists() and not _begins_like(path):
            raise OSError(f"{path} has other columns as well; move it elsewhere")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, MODE)
    try:
        end = _whole_lines(file)
        data = (text if end else f"{COLUMNS}\n{text}").encode()
        try:
            written = os.write(file, data)
        except OSError:
            os.ftruncate(file, end)
            raise
        if written < len(data):
            os.ftruncate(file, end)
            raise OSError(f"{written} of {len(data)} bytes were written; is the disk full?")
    finally:
        os.close(file)


def _begins_like(path: Path) -> bool:
    """Whether a file has these columns, or no whole line yet."""
    with open_regular(path) as file:
        first = file.readline(65536)
    return not first.endswith(b"\n") or first == f"{COLUMNS}\n".encode()


def _whole_lines(file: int) -> int:
    """The size of the file without a last line that has no end, which a machine that stopped may have left; that is cut off."""
    end = size = os.fstat(file).st_size
    while end:
        place = max(0, end - 65536)
        if found := os.pread(file, end - place, place).rfind(b"\n") + 1:
            end = place + found
            break
        end = place
    if end < size:
        os.ftruncate(file, end)
    return end


def _time(wall: int) -> str:
    """RFC 3339, with microseconds."""
    return datetime.fromtimestamp(wall // NS, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{wall % NS // 1000:06d}Z"


def _seconds(ns: int) -> str:
    return f"{'-' * (ns < 0)}{abs(ns) // NS}.{abs(ns) % NS:09d}"


def _micro(value: int) -> str:
    return f"{value // 10**6}.{value % 10**6:06d}"


def _quoted(text: str) -> str:
    """A field of CSV (RFC 4180)."""
    return '"' + text.replace('"', '""') + '"' if any(each in text for each in ',"\n\r') else text
