"""Decides for all devices: partitions, the server's state, where a change of models goes, and the end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from partitions import Misplaced, Move
from partitions.plan import Granules, assign
from partitions.probe import overlaps

from ..config.schema import Config, TenantConfig
from ..errors import BadRequest, NotFound
from ..protocol.json_document import show
from ..tenants.frontend import ManagedFrontend, Report, State
from ..tenants.lifecycle import Lifecycle
from .descriptions import NOT_OPENED, DeviceInfo, Execution, PartitionInfo, shares
from .device_runtime import DeviceRuntime

log = logging.getLogger("greenlane.control")

T = TypeVar("T")
_ALIVE = ("starting", "serving", "incomplete")
"""The states of a server that is not ending."""


@dataclass(slots=True)
class ControlledDevice:
    """A device, the runtime of each of its tenants (the same object for tenants of one process), and who holds what."""

    runtimes: dict[str, DeviceRuntime]
    info: DeviceInfo = NOT_OPENED
    held: dict[str, PartitionInfo] = field(default_factory=dict)
    host_cores: dict[str, frozenset[int] | None] = field(default_factory=dict)
    """The host's cores that each tenant's first partition reserved; None where it reserves none."""

    def hold(self, granules: Mapping[str, Granules]) -> None:
        """These tenants have these granules now."""
        sizes = self.info.granules
        self.held |= {name: PartitionInfo(tuple(each), sum(sizes[i] for i in each)) for name, each in granules.items()}

    def distinct(self, names: Iterable[str] | None = None) -> list[DeviceRuntime]:
        """The runtimes of these tenants, or of all, each once."""
        return list({id(each): each for each in (self.runtimes[name] for name in names or self.runtimes)}.values())

    def of(self, runtime: DeviceRuntime, values: Mapping[str, T]) -> dict[str, T]:
        """Those of `values`, by tenant, whose tenants this runtime has."""
        return {name: value for name, value in values.items() if self.runtimes[name] is runtime}

    def plan(self, counts: Mapping[str, int]) -> Move:
        """The change to these counts of granules; other tenants keep theirs. Raises DoesNotFit."""
        before = {name: partition.granules for name, partition in self.held.items()}
        kept = {name: len(granules) for name, granules in before.items()}
        return Move(before, assign(len(self.info.granules), before, {**kept, **counts}))


class Controller:
    """The decisions of one server, on devices that `add` names. Every method belongs to the event loop.

    `publish` is called with each state of the server.
    """

    def __init__(self, config: Config, frontends: Mapping[str, ManagedFrontend], publish: Callable[[State], None]) -> None:
        self.config = config
        self.devices: list[ControlledDevice] = []
        self.device_gone = asyncio.Event()
        """Set when the device is lost for good and every request is answered; only a new process can use it again."""
        self._frontends = frontends
        self._lifecycle = Lifecycle(publish)
        self._states: dict[str, State] = dict.fromkeys(frontends, "starting")
        self._repartitioning = asyncio.Lock()
        self.repartitions = 0
        """How often devices were partitioned, the first time included."""
        self._finishing: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Controller {self.state}, {'; '.join(shares(device.held) or 'all free' for device in self.devices)}>"

    @property
    def state(self) -> State:
        """The state of the server."""
        return self._lifecycle.state

    @property
    def ready(self) -> bool:
        """As `Lifecycle.ready`."""
        return self._lifecycle.ready

    def add(self, runtimes: Mapping[str, DeviceRuntime]) -> ControlledDevice:
        """Add a device by the runtime of each of its tenants, before `start`."""
        device = ControlledDevice(dict(runtimes))
        self.devices.append(device)
        return device

    async def start(self) -> None:
        """Open every device, partition it, and start loading models. Raises DoesNotFit, PartitionError or ConfigError."""
        await _all(self._start(device) for device in self.devices)
        self.repartitions += 1

    async def _start(self, device: ControlledDevice) -> None:
        runtimes = device.distinct()
        device.info = (await _all(runtime.open() for runtime in runtimes))[0]
        unit, sizes = device.info.unit, device.info.granules
        self.config.fit(unit, sizes, device.runtimes)
        counts = {name: self.config.tenants[name].share(unit, sizes) for name in device.runtimes}
        after = device.plan(counts).after
        for cores in await _all(runtime.start(device.of(runtime, after)) for runtime in runtimes):
            device.host_cores |= cores
        device.hold(after)
        log.info("%s: %s", device.info.description, shares(device.held))

    async def loaded(self) -> None:
        """Wait until every configured model was tried."""
        await _all(runtime.loaded() for device in self.devices for runtime in device.distinct())

    def on_state(self, tenants: Iterable[str], state: State) -> None:
        """The device side of these tenants has this state now."""
        if state in _ALIVE and self.state in _ALIVE:
            self._states |= dict.fromkeys(tenants, state)
            states = set(self._states.values())
            found: State = next((each for each in ("starting", "incomplete") if each in states), "serving")
            if found != self.state:
                if self.state == "starting":
                    self._reporting = asyncio.create_task(self._log_ready())
                self._lifecycle.set_state(found)

    def on_lost(self, reason: str) -> None:
        """The device of this process is lost, for all tenants: not ready, and new requests are refused."""
        if self.state not in ("lost", "closed"):
            self._lifecycle.set_state("lost")
            log.critical("the device is lost, this process will exit: %s", reason)
            self._finishing = asyncio.create_task(self._finish_lost(f"the device is lost: {reason}"))

    async def repartition(self, counts: Mapping[str, int]) -> Move:
        """Give these tenants these numbers of granules while all are served; the other tenants keep theirs.

        New partitions are created, loaded, warmed up and probed beside the old ones; then the tenants that move pause until
        their work in flight has ended, switch, and go on. Raises DoesNotFit with the arithmetic, BadRequest for an unknown
        tenant, a count below 1 or tenants of several devices, Conflict naming a tenant whose work takes longer than
        `max_pause`. After an error the old partitions stay.
        """
        device = self._check_counts(counts)
        async with self._repartitioning:
            move = device.plan(counts)
            await self._move(device, move)
            self.repartitions += 1
        log.info("repartitioned: %s", shares(device.held))
        return move

    async def _move(self, device: ControlledDevice, move: Move) -> None:
        """Carry out a move: prepared by all runtimes of the tenants that move, then halted by all, then committed by all."""
        runtimes = device.distinct(move.movers) if move.movers else []
        after = {name: move.after[name] for name in move.movers}
        try:
            placed: dict[str, frozenset[int]] = {}
            for placements in await _all(runtime.prepare(device.of(runtime, after)) for runtime in runtimes):
                placed |= placements
            if shared := overlaps(placed):
                raise Misplaced("; ".join(f"{a} and {b} both ran on {sorted(units)}" for a, b, units in shared))
            await _all(runtime.halt() for runtime in runtimes)
            await _all(runtime.commit() for runtime in runtimes)
            device.hold(after)
        except BaseException:
            await asyncio.shield(_all(runtime.discard() for runtime in runtimes))
            raise

    async def load(self, tenant: str, name: str, override: str | None = None) -> None:
        """As `DeviceRuntime.load`."""
        await self._runtime(tenant).load(tenant, name, override)

    async def unload(self, tenant: str, name: str) -> None:
        """As `DeviceRuntime.unload`."""
        await self._runtime(tenant).unload(tenant, name)

    async def reports(self) -> list[tuple[TenantConfig, Report]]:
        """The report of each tenant's HTTP side."""
        found = await _all(frontend.report() for frontend in self._frontends.values())
        return [(self.config.tenants[name], report) for name, report in zip(self._frontends, found, strict=True)]

    async def executions(self) -> list[Execution]:
        """How each model runs now; see `engines.Executor.describe`."""
        found = await _all(runtime.executions() for device in self.devices for runtime in device.distinct())
        return [execution for executions in found for execution in executions]

    async def probe(self, device: ControlledDevice) -> dict[str, frozenset[int]]:
        """Run a small amount of work in each partition of a device; the units on which it ran, by tenant."""
        async with self._repartitioning:
            found: dict[str, frozenset[int]] = {}
            for placements in await _all(runtime.probe() for runtime in device.distinct()):
                found |= placements
            return {name: found[name] for name in device.runtimes if name in found}

    def partition(self, tenant: str) -> PartitionInfo | None:
        """The tenant's partition; None before the start."""
        return next((device.held.get(tenant) for device in self.devices if tenant in device.runtimes), None)

    async def drain(self, grace: float) -> None:
        """Become not ready; after `grace` seconds refuse new requests, and return when the last one is answered.

        Builds that are still running then are abandoned. Inferences that have not ended after half of `drain_timeout` are
        cancelled, and waited for once more as long, at most a second.
        """
        if self.state in ("closed", "lost"):
            return
        self._lifecycle.set_state("draining")
        log.info("draining: not ready, new requests are refused in %g s", grace)
        await asyncio.sleep(grace)
        runtimes = [runtime for device in self.devices for runtime in device.distinct()]
        for runtime in runtimes:
            runtime.stop_loading()
        limit = self.config.server.drain_timeout / 2
        draining = asyncio.ensure_future(self._refuse_and_drain("the server is draining"))
        if not (await asyncio.wait({draining}, timeout=limit))[0]:
            text = f"the server is draining, and this had not ended after {limit:g} s (server.drain_timeout)"
            log.error("drain: cancelling inferences that have not ended after %g s, and those queued behind them", limit)
            for runtime in runtimes:
                runtime.abandon(text)
            if not (await asyncio.wait({draining}, timeout=min(limit, 1.0)))[0]:
                log.error("drain: some inferences cannot be cancelled; their requests are answered 503")
                for frontend in self._frontends.values():
                    frontend.suspend(text)
                return
        draining.result()
        log.info("drained: every request was answered")

    async def close(self) -> None:
        """Wait for work in flight, abandon builds, and release the devices. Idempotent."""
        if self.state != "closed":
            self._lifecycle.set_state("closed")
            async with self._repartitioning:  # One in progress is completed first.
                await _all(runtime.close() for device in self.devices for runtime in device.distinct())

    async def _log_ready(self) -> None:
        served = [f"{tenant.name} is served {_served(report)}" for tenant, report in await self.reports()]
        ready = "ready" if self.ready else "for server.strict_readiness, which asks for every model, not ready"
        log.info("%s: %s", ready, "; ".join(served))

    async def _finish_lost(self, reason: str) -> None:
        await self._refuse_and_drain(reason)
        self.device_gone.set()

    async def _refuse_and_drain(self, reason: str) -> None:
        for frontend in self._frontends.values():
            frontend.refuse(reason)
        await _all(frontend.drained() for frontend in self._frontends.values())

    def _runtime(self, tenant: str) -> DeviceRuntime:
        for device in self.devices:
            if tenant in device.runtimes:
                return device.runtimes[tenant]
        raise NotFound(f"tenant {tenant!r} has no device")

    def _check_counts(self, counts: Mapping[str, int]) -> ControlledDevice:
        """The device of these tenants. Raises BadRequest."""
        for name, count in counts.items():
            if name not in self.config.tenants:
                raise BadRequest(f"{name}: there is no such tenant; there are {', '.join(self.config.tenants)}")
            if type(count) is not int or count < 1:
                raise BadRequest(f"{name}: {show(count)} granules; expected an integer of at least 1")
        devices = [device for device in self.devices if any(name in device.runtimes for name in counts)]
        if len(devices) > 1:
            raise BadRequest(f"{', '.join(counts)}: these tenants are on several devices; change one device at a time")
        return devices[0] if devices else self.devices[0]


def _served(report: Report) -> str:
    """The models that are served with their versions, for the log."""
    versions: dict[str, list[str]] = {}
    for model in report.served:
        versions.setdefault(model.name, []).append(model.version)
    return " and ".join(f"{name} {', '.join(each)}" for name, each in versions.items()) or "nothing"


async def _all(work: "Iterable[Awaitable[T]]") -> list[T]:
    """Run all of these, wait for all of them also if some fail, and return their results or raise the first error."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if not isinstance(each, BaseException)]
