"""Keeps the account of all devices: follows the plans, and asks every device side what was used. When a device says what it has
moved, it asks at once, so that what was moved and what ran are of the same time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from partitions.plan import Granules

from ..accounts.account import Account, History
from ..accounts.drawn import Drawn
from ..accounts.harm import Harm
from ..accounts.traffic import NO_GUESSES, Traffic
from ..accounts.usage import NS, Moved, Report, Row, Totals
from ..control.controlled_device import ControlledDevice, memory_on
from ..control.descriptions import NOT_OPENED, ModelMemory
from ..control.device_runtime import DeviceRuntime
from ..control.fence import FencedModel, FencedTenant, Narrowing
from ..control.together import together
from ..errors import RequestError
from .usage_files import UsageFiles

log = logging.getLogger("greenlane.control")
fence_log = logging.getLogger("greenlane.fence")

INTERVAL = 1.0
"""Seconds between two reports. A process that is killed takes with it what it used since its last one."""
GUESSING = 60.0
"""Seconds between two looks at what models take of devices' memory, from which it is guessed what their works move."""
SAYING = 2.0
"""The same where tenants are fenced. After so long, and when a meter was read, device sides are said what works move."""
MANY = 10_000
"""Models whose weights are remembered, also while they are not loaded."""
LIMIT = 2.0
"""Seconds that the end of the server waits for the last row of the file."""


class Accountant:
    """Belongs to the event loop of the controller. `devices` are the controller's, which may still grow before `start`.

    `clock` and `wall` return nanoseconds, of a clock that does not go back and since 1970. `narrowed` is called when models
    of a fenced tenant have to be held on more granules or fewer, by what was seen of them (`ControlledDevice.narrowing`).
    `count` returns the bytes that each tenant's cores have moved, of those that are counted.
    """

    def __init__(
        self,
        devices: Sequence[ControlledDevice],
        files: UsageFiles | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
        narrowed: Callable[[], None] = lambda: None,
        count: Callable[[], Awaitable[Mapping[str, int]]] | None = None,
    ) -> None:
        self._devices = devices
        self._files = files
        self._clock = clock
        self._wall = wall
        self._narrowed = narrowed
        self._count = count
        self._counted: Mapping[str, int] = {}
        """What cores have moved, since the account was last brought up to date, and when they were asked for that last."""
        self._counted_at: int | None = None
        self._account = Account()
        self._history = History()
        self._answered: dict[int, int] = {}
        self._idle: dict[tuple[str, str], int] = {}
        self._moved: dict[str, tuple[Moved, int]] = {}
        """What devices said that they have moved, and when, since the account was last brought up to date."""
        self._said = asyncio.Event()
        self._guesses: Mapping[str, Mapping[Row, Moved]] = {}
        self._guessed: int | None = None
        self._weights: dict[tuple[str, Row], int] = {}
        """By device and model the bytes of its weights, when it was seen last."""
        self._said_at: int | None = None
        self._harm: dict[str, Harm] = {}
        self._drawn: dict[str, Drawn] = {}
        self._held: dict[str, set[Row]] = {}
        """By device: models to be held whatever they move."""
        self._collecting: asyncio.Task[None] | None = None
        self._failed = False

    def follow(self, device: ControlledDevice, granules: Mapping[str, Granules] = MappingProxyType({})) -> None:
        """A device is divided as it says from now on, and as it will say: these tenants are about to get these granules."""
        sizes = device.info.granules
        shares = {name: partition.size for name, partition in device.held.items()}
        shares |= {name: sum(sizes[index] for index in each) for name, each in granules.items()}
        self._account.hold(device.name, device.info.unit, sum(device.info.granules), shares, self._clock())

    def start(self) -> None:
        """Begin to ask, once a second, and whenever a device says what it has moved."""
        self._history.add(self.totals())
        if self._files:
            self._files.begin(self.totals())
        self._collecting = asyncio.create_task(self._collect_always())

    async def close(self) -> None:
        """Ask no more, and write the last rows. May be called again."""
        if self._collecting:
            self._collecting.cancel()
            with suppress(asyncio.CancelledError):
                await self._collecting
            self._collecting = None
            await self.write()

    async def write(self) -> None:
        """Ask once more, and write what was used up to now to the file, if there is one. Takes seconds at most."""
        await self._count_cores()
        totals = await self.collect()
        if self._files:
            with suppress(TimeoutError):
                async with asyncio.timeout(LIMIT):
                    await self._files.write(totals)

    async def settle(self, device: ControlledDevice, runtime: DeviceRuntime) -> None:
        """Ask a device side once more that is about to lose a tenant, and what its cores have moved. Raises nothing."""
        try:
            report = await runtime.usage()
            counted = await self._count() if self._count else {}
        except Exception as error:
            self._warn(error)
            return
        if isinstance(report, Report):
            self._account.report(id(runtime), device.name, report)
            moved = {each.tenant: counted[each.tenant] for each in report.tenants if each.tenant in counted}
            self._account.count(device.name, moved, self._clock(), self._guesses.get(device.name, NO_GUESSES))

    def moved(self, device: str, meter: Moved) -> None:
        """A device has moved so much since its meter began."""
        self._moved[device] = meter, self._clock()
        self._said.set()

    async def collect(self) -> Totals:
        """Ask every device side, and return what the account says then. One that does not answer counts as before."""
        opened = [device for device in self._devices if device.info is not NOT_OPENED]
        asked = [(device, runtime) for device in opened for runtime in device.distinct()]
        reports = await asyncio.gather(*(runtime.usage() for _, runtime in asked), return_exceptions=True)
        moved, self._moved = self._moved, {}
        counted, self._counted = self._counted, {}
        now, energy = self._clock(), dict[str, int]()
        for (device, runtime), report in zip(asked, reports, strict=True):
            if isinstance(report, Report):
                self._answered[id(runtime)] = now
                self._account.report(id(runtime), device.name, report)
                if report.energy is not None:  # Several processes may see the same meter.
                    energy[device.name] = max(report.energy, energy.get(device.name, 0))
            elif isinstance(report, BaseException):
                self._warn(report)
        for name, meter in energy.items():
            self._account.measure(name, meter, now)
        for name, (bytes_, at) in moved.items():
            self._account.move(name, bytes_, at, self._guesses.get(name, NO_GUESSES))
        for device in opened:
            self._account.count(device.name, device.own(counted), now, self._guesses.get(device.name, NO_GUESSES))
        totals = self.totals()
        for name, each in totals.devices.items():
            for tenant, theirs in each.tenants.items():
                self._idle[name, tenant] = max(theirs.idle, self._idle.get((name, tenant), 0))
        return totals

    def totals(self) -> Totals:
        """What the account says now, by the last reports."""
        return self._account.totals(self._clock(), self._wall())

    def traffic(self, device: str) -> Traffic | None:
        """As `Account.traffic`."""
        return self._account.traffic(device)

    def rates(self, device: str) -> Mapping[Row, tuple[Moved, Moved]]:
        """As `Account.rates`."""
        return self._account.rates(device)

    def before(self, wall: int) -> Totals | None:
        """As `History.before`."""
        return self._history.before(wall)

    def idle(self, device: str, tenant: str) -> int:
        """What was idle, as a count that never falls: work that is only reported after it has run does not take it back."""
        return self._idle.get((device, tenant), 0)

    def age(self, runtime: DeviceRuntime | None) -> float:
        """Seconds since a device side has reported; 0 if it never has."""
        now = self._clock()
        return (now - self._answered.get(id(runtime), now)) / NS

    async def _collect_always(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL):
                    await self._said.wait()
            self._said.clear()
            try:
                now, fenced = self._clock(), [device for device in self._devices if device.fences]
                for device in self._devices:
                    if not device.fences:
                        self._forget(device)
                if (read := bool(self._moved)) or fenced:
                    await self._guess(now, SAYING if fenced else GUESSING)
                if self._counted_at is None or now - self._counted_at >= SAYING * NS:
                    await self._count_cores()
                    if self._counted:
                        await self._guess(now, GUESSING)
                totals = await self.collect()
                self._history.add(totals)
                if self._files and self._files.due(totals):
                    self._files.begin_writing(totals)  # It may take long.
                changed = await together(self._look(device, totals) for device in fenced)
                if fenced and (read or any(changed) or self._said_at is None or now - self._said_at >= SAYING * NS):
                    self._said_at = now
                    await together(self._say(device) for device in fenced)
            except Exception as error:
                self._warn(error)

    async def _count_cores(self) -> None:
        if self._count:
            self._counted_at, self._counted = self._clock(), await self._count()

    def _forget(self, device: ControlledDevice) -> None:
        """No tenant is fenced there: what was seen of held models is not so any more once one is."""
        for known in (self._harm, self._drawn, self._held):
            known.pop(device.name, None)
        device.slows, device.narrowing = {}, {}

    async def _look(self, device: ControlledDevice, totals: Totals) -> bool:
        """See which models of fenced tenants slow works of others, and how much they draw where they are held; whether others
        than before are to be held.

        A model that slows others is held whatever it moves, to any share but the whole.
        """
        there, moves = totals.devices.get(device.name), device.info.bandwidth
        if there is None or moves is None:
            return False
        try:
            asked = await together(each.placements.states() for each in device.distinct(device.fences))
        except RequestError:  # It is being started again.
            return False
        fences = {tenant: state.fence for each in asked for tenant, state in each.items() if state.fence}
        rates = {tenant: fence.memory_bandwidth for tenant, fence in fences.items()}
        made = {name: len(fences[name].granules) for name, plan in device.fences.items() if plan.granules and name in fences}
        models = {
            (tenant, model.model): model
            for tenant, fence in fences.items()
            for model in fence.models
            if model.home_ms and fence.memory_bandwidth < moves.memory
        }
        harm = self._harm.setdefault(device.name, Harm())
        held, found = harm.held, dict(harm.found)
        narrow = {row: each.anyway or each.moved * 1e3 > rates[row[0]] * each.home_ms for row, each in models.items()}
        harm.look(there, totals.at, narrow, made)
        device.slows = dict(harm.found)
        self._held[device.name] = harm.held & models.keys()
        self._narrow(device, fences, models, totals.at)
        for (tenant, model), times in harm.found.items():
            if (tenant, model) not in found:
                text = (
                    "tenant %s: %s runs narrow while others work, whose inferences take at least %.2g times as long beside it"
                )
                fence_log.info(text, tenant, model, times)
        return harm.held != held

    def _narrow(
        self, device: ControlledDevice, fences: Mapping[str, FencedTenant], models: Mapping[Row, FencedModel], now: int
    ) -> None:
        """See what models draw where they are held, and have placements of other sizes if they may be wider, or may not."""
        harm, drawn = self._harm[device.name], self._drawn.setdefault(device.name, Drawn())
        traffic, sizes = self._account.traffic(device.name) or Traffic(), device.info.granules
        held = {
            row: traffic.most_memory_of(row) / each.narrow_ms * 1e3 if each.narrow_ms else 0.0
            for row, each in models.items()
            if row not in harm.held and each.moved * 1e3 > fences[row[0]].memory_bandwidth * each.home_ms
        }
        units = {tenant: sum(sizes[granule] for granule in fence.granules) for tenant, fence in fences.items()}
        drawn.look(now, units, held, self._guesses.get(device.name, NO_GUESSES).keys())
        single = harm.single
        narrowing = {name: Narrowing(drawn.units.get(name, 0), name in single) for name in single | drawn.units.keys()}
        if narrowing != device.narrowing:
            device.narrowing = narrowing
            self._narrowed()

    async def _say(self, device: ControlledDevice) -> None:
        """Say to each device side what works of its fenced tenants move. Models that have gone are not named any more."""
        traffic, guesses = self._account.traffic(device.name) or Traffic(), self._guesses.get(device.name, NO_GUESSES)
        figures: dict[str, dict[str, int]] = {name: {} for name in device.fences}
        held = self._held.get(device.name, ())
        for (tenant, model), guess in guesses.items():
            if tenant in figures:
                moved = traffic.memory_of((tenant, model), guess.memory)
                figures[tenant][model] = -max(1, moved) if (tenant, model) in held else moved
        with suppress(RequestError):  # It is being started again, and is said it then.
            await together(each.placements.moved(device.of(each, figures)) for each in device.distinct(figures))

    async def _guess(self, now: int, every: float) -> None:
        """A work reads its model's weights and its inputs, and writes its outputs; over PCIe it is the latter two."""
        if self._guessed is not None and now - self._guessed < every * NS:
            return
        self._guessed = now
        try:
            memory = await memory_on(self._devices)
        except Exception as error:
            self._warn(error)
            return
        found = {
            (device, (tenant, f"{each.name}/{each.version}")): each
            for device, tenants in memory.items()
            for tenant, theirs in tenants.items()
            for each in theirs.models
        }
        guesses: dict[str, dict[Row, Moved]] = {device: {} for device in memory}
        for (device, row), each in found.items():
            guesses[device][row] = _guessed(each)
            if (weights := _weights(each)) and self._weights.setdefault((device, row), weights) != weights:
                self._account.forget(device, row)  # Loaded again with other ones.
                self._weights[device, row] = weights
        self._guesses = guesses
        if len(self._weights) > MANY:
            self._weights = {key: each for key, each in self._weights.items() if key in found}

    def _warn(self, error: BaseException) -> None:
        """Once, so that the log is not full of it."""
        if not self._failed:
            self._failed = True
            log.error("the account misses what a device side used, as it could not be asked: %s", error, exc_info=error)


def _guessed(model: ModelMemory) -> Moved:
    buffers = model.memory.get("buffers", 0)
    return Moved(_weights(model) + buffers, buffers, buffers)


def _weights(model: ModelMemory) -> int:
    return model.memory.get("weights", model.memory.get("file", 0))  # Of ONNX Runtime's it is known how large the file is.
