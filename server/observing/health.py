"""Keeps the last readings of what devices say of their state. It asks no GPU itself; `partitions.health` says why."""

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from partitions.health import INTERVAL, CoreTime, Health, command, core_times, from_line, on_bus

from ..accounts.usage import Moved
from ..control.controlled_device import ControlledDevice
from ..host.backoff import Backoff

log = logging.getLogger("greenlane.control")

_FIRST = 0.1
"""Seconds from the first look at cores to the second, so that there is something to show soon."""
_OLD = 5 * INTERVAL
"""Seconds after which a reading does not say what a GPU moves now."""


class HealthMonitor:
    """Belongs to the event loop of the controller. `devices` are the controller's, which are open when it starts.

    `make` returns the command of the process that reads GPUs; `root` is where /proc is; `clock` returns seconds. `moved` is
    called with what a GPU has moved, whenever it says so.
    """

    def __init__(
        self,
        devices: Sequence[ControlledDevice],
        make: Callable[[Sequence[str]], list[str]] = command,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        moved: Callable[[str, Moved], None] = lambda _, __: None,
    ) -> None:
        self._devices = devices
        self._moved = moved
        self._make = make
        self._root = root
        self._clock = clock
        self._readings: dict[str, tuple[Health, float]] = {}
        self._first_energy: dict[str, float] = {}
        self._moving: dict[str, Mapping[str, float]] = {}
        self._cores: tuple[Mapping[int, CoreTime], Mapping[int, CoreTime]] = {}, {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to read, every two seconds."""
        gpus = {device.info.address: device.name for device in self._devices if on_bus(device.info.address)}
        self._tasks.append(asyncio.create_task(self._follow_cores()))
        if gpus:
            self._tasks.append(asyncio.create_task(self._follow_gpus(gpus)))

    async def close(self) -> None:
        """Read no more. May be called again."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    def reading(self, device: str) -> tuple[Health, float] | None:
        """The last reading of a GPU, and its age in seconds; None if there is none."""
        found = self._readings.get(device)
        return found and (found[0], self._clock() - found[1])

    def energy(self, device: str) -> float | None:
        """Joules that a GPU took since the first reading; None if it does not report them."""
        found = self._readings.get(device)
        if found is None or found[0].energy is None:
            return None
        return found[0].energy - self._first_energy[device]

    def moving(self, device: str) -> Mapping[str, float]:
        """Bytes a second that a GPU moved between the last two readings, by path as in `Health.moved`, unless these are old."""
        found = self.reading(device)
        return self._moving.get(device, {}) if found and found[1] < _OLD else {}

    @property
    def cores(self) -> Mapping[int, CoreTime]:
        """The time of each of this host's cores."""
        return self._cores[1]

    def busy(self, cores: Sequence[int]) -> float | None:
        """The part of the time, 0 to 1, in which these cores were busy between the last two looks; None if it is not known."""
        before, after = self._cores
        there = [core for core in cores if core in before and core in after]
        passed = sum(after[core].all - before[core].all for core in there)
        return sum(after[core].busy - before[core].busy for core in there) / passed if passed > 0 else None

    def take(self, address: str, device: str, health: Health) -> None:
        """This is how the GPU at this address is now. Logs that it is lost, and errors of the driver, when they are new."""
        previous = self._readings.get(device)
        if health.missing and previous is None:
            log.warning("device %s: of the GPU's state only what it moves and takes is read: %s", device, health.missing)
        if health.lost and not (previous and previous[0].lost):
            log.critical("GPU %s (device %s) does not answer any more: it is lost", address, device)
        for number, count in health.xids.items():
            if count > (previous[0].xids.get(number, 0) if previous else 0):
                log.error("GPU %s (device %s): the driver reports XID %s", address, device, number)
        if health.energy is not None:
            self._first_energy.setdefault(device, health.energy)
        now = self._clock()
        if previous and now > previous[1]:
            before = previous[0].moved
            since = {path: count - before[path] for path, count in health.moved.items() if count >= before.get(path, count + 1)}
            self._moving[device] = {path: count / (now - previous[1]) for path, count in since.items()}
        self._readings[device] = health, now
        if health.moved or (previous and previous[0].moved and not health.lost):  # Another process begins to count, at 0.
            self._moved(device, Moved(*(health.moved.get(path, 0) for path in Moved._fields)))

    def take_cores(self, found: Mapping[int, CoreTime]) -> None:
        """This is the time of each of this host's cores now."""
        self._cores = self._cores[1], found

    async def _follow_cores(self) -> None:
        pause = _FIRST
        while True:
            try:
                found = await asyncio.to_thread(core_times, self._root)
            except (OSError, ValueError) as error:
                log.info("the time of cores is not among the metrics: %s", error)
                return
            self.take_cores(found)
            await asyncio.sleep(pause)
            pause = INTERVAL

    async def _follow_gpus(self, gpus: Mapping[str, str]) -> None:
        """Read what the process writes, and start another one when it ends: unless it could not read anything."""
        backoff = Backoff()
        while True:
            backoff.started(self._clock())
            why = await self._read(gpus)
            if not self._readings:
                log.warning("GPUs' utilisation, memory, power and clocks are not among the metrics: %s", why)
                return
            log.error("the process that reads GPUs' state ended: %s", why)
            await asyncio.sleep(backoff.delay(self._clock()))

    async def _read(self, gpus: Mapping[str, str]) -> str:
        """Start the process, and read it until it ends. Returns its last words, on standard error, or why it does not start."""
        pipe = subprocess.PIPE
        try:
            process = await asyncio.to_thread(subprocess.Popen, self._make(list(gpus)), stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            return str(error)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        lines = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), process.stdout
        )
        try:
            async for line in lines:
                self._take_line(line, gpus)
            return (await asyncio.to_thread(process.stderr.read)).decode(errors="replace").strip()
        finally:
            transport.close()
            process.kill()
            process.stdin.close()
            process.stderr.close()
            with suppress(subprocess.TimeoutExpired):  # In a call of the driver that does not return.
                process.wait(1.0)

    def _take_line(self, line: bytes, gpus: Mapping[str, str]) -> None:
        try:
            address, health = from_line(line)
            device = gpus[address]
        except (ValueError, KeyError) as error:
            log.warning("the process that reads GPUs' state wrote something else: %s", error)
            return
        self.take(address, device, health)
