"""Decides for all devices: partitions, the server's state, where a change of models goes, and the end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeVar

from partitions import DeviceUnavailable, Misplaced, Move, PartitionError
from partitions.plan import Granules
from partitions.probe import Overlap, Placement, explained, overlaps, scattered
from partitions.strain import Strain, Strained

from ..config.schema import Config, ModelsConfig
from ..config.tables import ConfigError
from ..config.tenant import TenantConfig
from ..errors import Conflict, NotFound, Unavailable
from ..facts import milliseconds
from ..tenants.frontend import Lifecycle, ManagedFrontend, Report, State
from .controlled_device import ControlledDevice, Observer, memory_on
from .descriptions import NOT_OPENED, Execution, Loading, PartitionInfo, TenantMemory, shares
from .device_runtime import Arrival, DeviceRuntime, Models, TenantHost, halt_all
from .draining import drain, refuse_and_drain
from .moves import By, MoveLog, check_counts, plan_transfer
from .moves import Move as MoveRecord
from .placement_plans import PlacementPlans
from .start_progress import StartProgress
from .tenant_plan import UNCHANGED, TenantPlan
from .together import completed, together

log = logging.getLogger("greenlane.control")

Transfer = Callable[[str, DeviceRuntime, str, Granules], Awaitable[DeviceRuntime]]
"""Has a tenant served by another device than this runtime's, on these granules, and returns its runtime there; see
`server.processes.supervision.tenant_processes`.
"""
_ALIVE = ("starting", "serving", "incomplete")
"""The states of a server that is not ending."""
_HOLDS = 0.002, 0.002, *(0.005,) * 3, *(0.02,) * 20, *(0.1,) * 8, 0.5, 0.5
"""Seconds for which partitions of a shared device are held to see that they are apart: the next for those that were not held
together yet. On an H100 2 ms were enough for 15 processes on idle cores (2026-11-26), and who is late once seldom is again.
While 20 ms came second, a repartition cost tenants whose share stayed 21 ms (2026-11-28). A process that loads a model begins
when the driver's lock is free, so another try soon after is worth more than a longer one, and costs the others less. The
longest are for a tenant with such long kernels."""
_BRIEFLY = 0.0005
"""Seconds for which a try holds a partition that did not move: it is compared only with those that moved, which are held
meanwhile. If not all its units have begun by then, later tries hold it as long as the others."""
_STANDSTILL = 600.0
"""Seconds in which a start looks at partitions again while the same models are loaded. No load is known that has the driver's
lock for so long, so what blocks the looks will not end."""
_PATIENCE = 60.0
"""Most clients have given up by then, and do not expect that what they asked for is done later."""
_MOST_ASKED = 10
"""How often all processes are asked what is served, before the log says that the server is ready."""
MOST_STRAINS = 4
"""Strains that run or wait at a time: a repartition waits for all that came before it, and each may last for two seconds."""
DeviceState = Literal[State, "restarting"]
T = TypeVar("T")


class Controller:
    """The decisions of one server, on devices that `add` names. Every method belongs to the event loop.

    `publish` is called with each state of the server. `transfer` moves a tenant from one device to another, where that is
    possible.
    """

    def __init__(
        self,
        config: Config,
        frontends: Mapping[str, ManagedFrontend],
        publish: Callable[[State], None],
        transfer: Transfer | None = None,
    ) -> None:
        self.config = config
        self.devices: list[ControlledDevice] = []
        self.observers: list[Observer] = []
        self.on_reconfigured: Callable[[], None] = lambda: None
        """Called when another configuration is used."""
        self.on_progress: Callable[[str], None] = lambda _: None
        """Called, while the server starts, with how far that is, for clients."""
        self.tenant_host: TenantHost | None = None
        """What starts and ends tenants while others are served; None where that is not possible."""
        self._transfer = transfer
        self.patience = _PATIENCE
        """Seconds for which a change of granules, a probe, a strain or a reload waits for each change before."""
        self.started = time.time()
        self.restarts: dict[str, int] = {}
        """How often each process of the server ended unexpectedly and was started again, by its name in the log."""
        self.refused_connections: dict[str, int] = {}
        """How many connections the dispatcher refused before any process had them, by the reason."""
        self.device_gone = asyncio.Event()
        """Set when the device is lost for good and every request is answered; only a new process can use it again."""
        self._frontends = dict(frontends)
        self._lifecycle = Lifecycle(publish)
        self._refuses_at: float | None = None
        """When a drain refuses new requests, in the event loop's time; None before one."""
        self._states: dict[str, State] = {}
        """Of the device side of each tenant."""
        self.reconfiguring = False
        """Whether another configuration is being made ready to be used, or tenants go."""
        self.moves = MoveLog()
        self.device_changes = asyncio.Lock()
        """Held while a tenant changes its device, or a reload loads what a process that begins for one would not know. Taken
        before `_changing`, and those before `granules_change`: loads of some tenants keep no others from a repartition."""
        self._changing = {name: asyncio.Lock() for name in frontends}
        """Held while a tenant's models change on request, or its device."""
        self.granules_change = asyncio.Lock()
        """Held while granules change hands, or a probe runs."""
        self.placements = PlacementPlans(config.tenants, self.devices, self.granules_change)
        self._strains = 0
        self.repartitions = 0
        """How often devices were partitioned, the first time included."""
        self._progress = StartProgress()
        self._finishing: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None

    @property
    def tenants(self) -> Mapping[str, TenantConfig]:
        """The tenants by name, as they are configured now."""
        return self.config.tenants

    @property
    def models(self) -> ModelsConfig:
        """The model repository, as it is configured now."""
        return self.config.models

    @property
    def state(self) -> State:
        """The state of the server."""
        return self._lifecycle.state

    @property
    def ready(self) -> bool:
        """As `Lifecycle.ready`."""
        return self._lifecycle.ready

    @property
    def moving(self) -> bool:
        """Whether granules are being moved now, or a probe runs."""
        return self.granules_change.locked()

    @property
    def counts(self) -> dict[str, int]:
        """How many granules each tenant has."""
        return _joined(device.counts for device in self.devices)

    def add(
        self, runtimes: Mapping[str, DeviceRuntime], name: str = "0", process: DeviceRuntime | None = None, adopts: bool = True
    ) -> ControlledDevice:
        """Add a device by its name and the runtime of each of its tenants, before `start`.

        `process` and `adopts` are as for `ControlledDevice`.
        """
        device = ControlledDevice(name, dict(runtimes), process, adopts)
        self.devices.append(device)
        self._states |= dict.fromkeys(runtimes, "starting")
        return device

    async def start(self) -> None:
        """Open every device, partition it, and start loading models. Raises DoesNotFit, PartitionError or ConfigError."""
        await together(self._start(device) for device in self.devices)
        self.repartitions += 1
        for each in self.observers:
            each.start()
        self.placements.begin(self.loaded)

    async def _start(self, device: ControlledDevice) -> None:
        if not (runtimes := device.distinct()):
            log.warning("device %s has no tenant", device.name)
            return
        device.info = (await together(runtime.open() for runtime in runtimes))[0]
        unit, sizes = device.info.unit, device.info.granules
        self.config.fit(unit, sizes, device.runtimes)
        counts = {name: self.tenants[name].share(unit, sizes) for name in device.runtimes}
        after = device.plan(counts).after
        if problems := self.config.too_much(after, sizes, device.info.bandwidth):
            raise ConfigError(problems)
        for cores in await together(runtime.start(device.of(runtime, after)) for runtime in runtimes):
            device.host_cores |= cores
        await self._check_started(device, after)
        device.hold(after)
        self._divided(device)
        which = f"device {device.name}, " if len(self.devices) > 1 else ""
        log.info("%s%s: %s", which, device.info.description, shares(device.info, device.held) or "all free")

    async def loaded(self) -> None:
        """Wait until every configured model was tried."""
        await together(runtime.loaded() for device in self.devices for runtime in device.distinct())

    def on_state(self, tenants: Iterable[str], state: State, device: str = "0") -> None:
        """The device side of these tenants has this state now."""
        if state in _ALIVE and self.state in _ALIVE:
            known = [tenant for tenant in tenants if self.runtime(device, tenant)]  # Not those that come or go.
            self._states |= dict.fromkeys(known, state)
            states = set(self._states.values())
            found = self._of_all(states)
            if found != self.state:
                if self.state == "starting":
                    self._reporting = asyncio.create_task(self._log_ready())
                self._lifecycle.set_state(found)

    def _of_all(self, states: Collection[State]) -> State:
        """The state of a server whose device sides have these. One that has no model does not make all others not ready."""
        if "starting" in states:
            return "starting"
        incomplete = [state == "incomplete" for state in states]
        return "incomplete" if (any if self.config.server.strict_readiness else all)(incomplete) and incomplete else "serving"

    def on_loading(self, loading: Loading) -> None:
        """The device side of a tenant loads this now."""
        if self.state == "starting":
            self._progress.on_loading(loading, self.tenants)
            self.on_progress(self._progress.public(self.tenants))

    @property
    def progress(self) -> str:
        """How far the start is, for administrators; "" once the server has started."""
        return self._progress.line(self.tenants) if self.state == "starting" else ""

    def on_lost(self, reason: str) -> None:
        """The device of this process is lost, for all tenants: not ready, and new requests are refused."""
        if self.state not in ("lost", "closed"):
            self._lifecycle.set_state("lost")
            log.critical("the device is lost, this process will exit: %s", reason)
            self._finishing = asyncio.create_task(self._finish_lost(f"the device is lost: {reason}"))

    async def repartition(self, counts: Mapping[str, int], by: By = "operator", reason: str = "") -> tuple[str, ...]:
        """Give these tenants these numbers of granules while all are served; the other tenants keep theirs.

        New partitions are created, loaded, warmed up and probed beside the old ones; then the tenants that move pause until
        their work in flight has ended, switch, and go on. Where several processes have tenants that move, they move all or
        none: each process prepares and halts before any commits. Raises DoesNotFit with the arithmetic, BadRequest for an
        unknown tenant or a count below 1, Conflict naming a tenant whose work takes longer than `max_pause`, or if an earlier
        change takes longer than `patience`. After an error the old partitions stay. Shares that all these tenants have already
        are no move, and not recorded as one, but an operator's wish pauses the autopilot all the same. Returns the tenants
        whose granules have changed, sorted.
        """
        async with self.holding(self.granules_change):
            check_counts(counts, self.tenants)
            if counts.items() <= self.counts.items():
                if by == "operator":
                    self.moves.give(counts)
                return ()
            with self.recorded(by, reason, counts) as record:
                moves = [(device, device.plan(own)) for device in self.devices if (own := device.own(counts))]
                for device, move in moves:
                    self.placements.check(device, move.after)
                await self.move(moves, record)
                self.repartitions += 1
        log.info("repartitioned: %s; %s", "; ".join(shares(device.info, device.held) for device, _ in moves), record)
        return tuple(sorted(name for _, move in moves for name in move.movers))

    @asynccontextmanager
    async def holding(self, lock: asyncio.Lock, other: str = "") -> AsyncIterator[None]:
        """Hold this lock. Raises Conflict if another change holds it for longer than `patience`; `other` says which."""
        try:
            async with asyncio.timeout(self.patience):
                await lock.acquire()
        except TimeoutError:
            other = other or ("a reload, which may load models," if self.reconfiguring else "another change")
            why = f"{other} has gone on for {self.patience:g} s; try again when it has ended"
            raise Conflict(f"{UNCHANGED}: {why}") from None
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def recorded(self, by: By, reason: str, counts: Mapping[str, int]) -> Iterator[MoveRecord]:
        """Record what this block does as a move to these shares: refused if it raises. An operator's pauses the autopilot."""
        record, began = self.moves.begin(by, reason, self.counts, counts), time.monotonic()
        try:
            yield record
            record.outcome = "moved"
        except BaseException as error:
            record.outcome, record.error = "refused", str(error)
            raise
        finally:
            record.took_ms = milliseconds(time.monotonic() - began)
            if by == "operator" and record.outcome == "moved":
                self.moves.give(counts)

    async def move(self, moves: Sequence[tuple[ControlledDevice, Move]], record: MoveRecord) -> None:
        """Carry out a move on each of some devices: prepared by all runtimes of tenants that move, halted by all, committed."""
        after = {device.name: {name: move.after[name] for name in move.movers} for device, move in moves}
        moving = [(device, runtime) for device, move in moves if move.movers for runtime in device.distinct(move.movers)]
        began = time.monotonic()
        try:
            prepared = await together(
                runtime.moves.prepare(device.of(runtime, after[device.name])) for device, runtime in moving
            )
            placed: dict[int, dict[str, frozenset[int]]] = {}
            for (device, _), placements in zip(moving, prepared, strict=True):
                placed.setdefault(id(device), {}).update(placements)
            if shared := [each for placements in placed.values() for each in overlaps(placements)]:
                raise Misplaced("; ".join(map(explained, shared)))
            await together(self._check_held(device, after[device.name]) for device, _ in moves)
            record.prepared_ms = milliseconds(time.monotonic() - began)
            await self.placements.narrow(moves)
            alone = len(moving) == 1
            if not alone:
                await halt_all([runtime.moves for _, runtime in moving])
            for device, _ in moves:  # Now, as what the old partitions hold may take long to close.
                self._divided(device, after[device.name])
            for pauses in await together(runtime.moves.switch() if alone else runtime.moves.commit() for _, runtime in moving):
                record.paused |= pauses
            for device, _ in moves:
                device.hold(after[device.name])
        except BaseException:
            for device, _ in moves:
                self._divided(device)
            await asyncio.shield(together(runtime.moves.discard() for _, runtime in moving))
            raise
        finally:
            self.placements.remake()

    async def transfer(self, tenant: str, to: str, count: int | None = None) -> None:
        """Move a tenant to another device while it is served, onto `count` granules there, by default as many as it has.

        Its models are loaded there first. Raises NotFound for an unknown tenant, BadRequest for an unknown device, DoesNotFit
        with the arithmetic, Unavailable while one of the devices does not serve, Conflict if a model is not served there or the
        tenant's work takes longer than `max_pause`. After an error it is served as before.
        """
        async with (
            self.holding(self.device_changes),
            self.holding(self.models_change(tenant)),
            self.holding(self.granules_change),
        ):
            transfer = self._transfer
            state_of = partial(self.device_state, tenant=tenant)
            move = plan_transfer(self.devices, tenant, to, count, state_of, transfer is not None)
            if move is None or transfer is None:
                return
            source, target, after = move
            self.placements.check(target, {**target.homes, tenant: after})
            with self.recorded("operator", f"{tenant} to device {to}", {tenant: len(after)}):
                new = await transfer(tenant, source.runtimes[tenant], to, after)
            source.remove(tenant)
            target.runtimes[tenant] = new
            target.hold({tenant: after})
            self._divided(source)
            self._divided(target)
            self.repartitions += 1
            self.placements.remake()
            await self.look_held(target)
        log.info("tenant %s moved from device %s to device %s: %s", tenant, source.name, to, shares(target.info, target.held))

    async def leaving(self, device: ControlledDevice, runtime: DeviceRuntime) -> None:
        """Have the observers ask a device side for the last time that is about to lose a tenant."""
        await together(each.leaving(device, runtime) for each in self.observers)

    def models_change(self, tenant: str) -> asyncio.Lock:
        """Held while a tenant's models change on request, or its device. Raises NotFound if there is no such tenant."""
        if tenant not in self._changing:
            raise NotFound(f"{tenant}: there is no such tenant; there are {', '.join(self._changing)}")
        return self._changing[tenant]

    def use(self, config: Config, plan: TenantPlan, arrivals: Mapping[str, Arrival]) -> Mapping[str, ManagedFrontend]:
        """Decide by this configuration from now on, and for the tenants that came by this plan. Returns the HTTP sides of those
        that have gone.
        """
        self.config = config
        self.on_reconfigured()
        for name, device in plan.go.items():
            device.remove(name)
            self._states.pop(name, None)
            self._changing.pop(name)
        for name, (device, granules) in plan.come.items():
            arrival = arrivals[name]
            device.runtimes[name] = arrival.runtime
            device.hold({name: granules})
            device.host_cores |= arrival.host_cores
            self._states[name] = "serving"
            self._changing[name] = asyncio.Lock()
            self.moves.given.add(name)
        frontends = {**self._frontends, **{name: each.frontend for name, each in arrivals.items()}}
        self._frontends = {name: frontends[name] for name in config.tenants}
        for device in self.devices:
            if device.info is not NOT_OPENED:
                self._divided(device)
        self.placements.reconfigure(config.tenants)
        if plan.go or plan.come:
            self.repartitions += 1
            self.on_state((), "serving")
        return {name: frontends[name] for name in plan.go}

    async def load(self, tenant: str, name: str, override: str | None = None) -> None:
        """As `Models.load`. Raises NotFound for a tenant that has gone."""
        await self._change(tenant, lambda models: models.load(tenant, name, override))

    async def unload(self, tenant: str, name: str) -> None:
        """As `Models.unload`. Raises NotFound for a tenant that has gone."""
        await self._change(tenant, lambda models: models.unload(tenant, name))

    async def refresh(self, tenant: str, name: str) -> str:
        """As `Models.refresh`. Raises NotFound for a tenant that has gone."""
        return await self._change(tenant, lambda models: models.refresh(tenant, name))

    async def _change(self, tenant: str, change: Callable[[Models], Awaitable[T]]) -> T:
        """Have a tenant's device side change its models, after earlier changes.

        Once begun it is completed even if the caller is cancelled, since the device side goes on too: until then nothing else
        may change the models, nor the device.
        """
        lock = self.models_change(tenant)
        await lock.acquire()
        return await completed(self._change_and_release(tenant, change, lock))

    async def _change_and_release(self, tenant: str, change: Callable[[Models], Awaitable[T]], lock: asyncio.Lock) -> T:
        try:
            return await change(self._runtime_of(tenant).models)
        finally:
            lock.release()

    async def reports(self) -> list[tuple[TenantConfig, Report]]:
        """The report of each tenant's HTTP side."""
        frontends = [(self.tenants[name], frontend) for name, frontend in self._frontends.items()]
        found = await together(frontend.report() for _, frontend in frontends)
        return [(tenant, report) for (tenant, _), report in zip(frontends, found, strict=True)]

    async def executions(self) -> list[Execution]:
        """How each model runs now, one entry a version; see `engines.Executor.describe`."""
        found = await together(together(each.models.executions() for each in device.distinct()) for device in self.devices)
        return [
            each
            for device, executions in zip(self.devices, found, strict=True)
            for of_runtime in executions
            for each in of_runtime
            if each.tenant in device.runtimes  # Not of one that moves, which two devices have then.
        ]

    async def memory(self) -> list[TenantMemory]:
        """What each tenant's models take of their device's memory now, in the order of the configuration."""
        by_tenant = _joined((await memory_on(self.devices)).values())
        return [by_tenant[name] for name in self.tenants if name in by_tenant]

    async def probe(self, device: ControlledDevice) -> tuple[dict[str, Placement], list[Overlap]]:
        """Run a small amount of work in each partition of a device; the units on which it ran, by tenant, and who shares some.

        Where units have no numbers, the work takes all of them, again and again until each two partitions have had theirs at
        the same time. A tenant stands still for 2 ms, and for 2 to 500 ms with each further try that it takes part in.
        """
        async with self.holding(self.granules_change):
            runtimes = device.distinct()
            found, shared = await self._probe(device, runtimes, runtimes)
            if shared:
                device.apart = {}
            return found, shared

    async def strain(self, tenant: str, kind: Strain, seconds: float) -> Strained:
        """Move bytes by this tenant's partition for so long; see `Partition.strain`.

        Granules stay where they are meanwhile, so no more wait than MOST_STRAINS. Raises NotFound, Conflict if so many do, and
        once the server drains, as its end waits for each, and as `DeviceRuntime.strain` does.
        """
        if self._strains >= MOST_STRAINS:
            why = f"{self._strains} strains run or wait already, one after another; ask again when they have ended"
            raise Conflict(f"tenant {tenant}: {why}")
        self._strains += 1
        try:
            async with self.holding(self.granules_change):
                if self._lifecycle.state in ("draining", "closed"):
                    raise Conflict(f"tenant {tenant}: its share is not strained while the server drains")
                return await self._runtime_of(tenant).strain(tenant, kind, seconds)
        finally:
            self._strains -= 1

    async def _probe(
        self,
        device: ControlledDevice,
        runtimes: Sequence[DeviceRuntime],
        needed: Collection[DeviceRuntime],
        apart: Set[str] = frozenset(),
    ) -> tuple[dict[str, Placement], list[Overlap]]:
        """As `probe` of these runtimes' tenants, of whom those among `apart` are not compared with each other.

        One whose process ends meanwhile is left out, as it uses no units then. Raises Unavailable if it is `needed`.
        """

        async def look(runtime: DeviceRuntime, seconds: float) -> dict[str, Placement]:
            try:
                return await runtime.probe(seconds)
            except Unavailable:
                if runtime in needed:
                    raise
                return {}

        looks, moved = list[dict[str, Placement]](), {device.runtimes[name] for name in device.runtimes.keys() - apart}
        brief = {*runtimes} - moved
        runtimes = sorted(runtimes, key=brief.__contains__)  # First those that are held for longer.
        for seconds in _HOLDS:
            found = await together(look(runtime, _BRIEFLY if runtime in brief else seconds) for runtime in runtimes)
            looks.append({name: each for placements in found for name, each in placements.items()})
            shared = overlaps(*looks, apart=apart)
            if not device.info.shared or not shared:
                break
            late, both = {name for pair in shared for name in pair[:2]}, list(zip(runtimes, found, strict=True))
            runtimes = [runtime for runtime, placements in both if late & placements.keys()]
            brief -= {runtime for runtime, placements in both if scattered(placements)}
        placed = {name: each for look in looks for name, each in look.items()}
        return {name: placed[name] for name in device.runtimes if name in placed}, shared

    async def look_held(self, device: ControlledDevice) -> None:
        """Log it if partitions that are in use already are not apart, since there is no way back."""
        try:
            await self._check_held(device)
        except (Misplaced, Conflict, Unavailable) as error:
            log.critical("%s; POST /admin/partitions/probe looks again", error)

    async def _check_started(self, device: ControlledDevice, granules: Mapping[str, Granules]) -> None:
        """As `_check_held`, as often as it takes: models are being loaded, and nothing but the start waits for the partitions.

        Raises PartitionError if a process ends meanwhile, DeviceUnavailable if no load goes on for `_STANDSTILL`.
        """
        why = f"device {device.name}: its partitions could not be seen to be apart"
        loop = asyncio.get_running_loop()
        progress, since = "", loop.time()
        while True:
            try:
                return await self._check_held(device, granules)
            except Conflict as error:
                if progress != self.progress:
                    progress, since = self.progress, loop.time()
                if (stood := loop.time() - since) >= _STANDSTILL:
                    what = f"in {stood:.0f} s, in which no load went on ({progress})"
                    raise DeviceUnavailable(f'{why} {what}: {error}. Leave out such a model, or set mps = "off"') from error
                log.warning("device %s, which is looked at again: %s", device.name, error)
            except Unavailable as error:
                raise PartitionError(f"{why}: {error}") from error

    async def _check_held(self, device: ControlledDevice, moved: Mapping[str, Granules] = MappingProxyType({})) -> None:
        """Raise Misplaced unless all partitions of a shared device, in each process that is not away, are apart.

        Those that `moved` are represented by their new ones. Two that were seen to be apart, and neither of which has moved or
        is in another process since, are not compared again.
        Raises Conflict, naming a tenant whose work keeps its partition from being looked at for longer than `max_pause`.
        """
        if device.info.shared:
            there = {
                name: (runtime, runtime.processes, moved.get(name) or device.held[name].granules)
                for name, runtime in device.runtimes.items()
                if not runtime.away
            }
            apart = {name for name, each in there.items() if name not in moved and device.apart.get(name) == each}
            if apart == there.keys():
                return
            _, shared = await self._probe(device, [runtime for runtime, *_ in there.values()], device.distinct(moved), apart)
            if shared:
                raise Misplaced(f"device {device.name}: " + "; ".join(map(explained, shared)))
            device.apart = there

    def partition(self, tenant: str) -> PartitionInfo | None:
        """The tenant's partition; None before the start."""
        device = self.device_of(tenant)
        return device.held.get(tenant) if device else None

    def device_of(self, tenant: str) -> ControlledDevice | None:
        """The device that the tenant is on; None if there is no such tenant."""
        return next((device for device in self.devices if tenant in device.runtimes), None)

    def runtime(self, device: str, tenant: str) -> DeviceRuntime | None:
        """The runtime of a tenant on this device; None if it is not there now."""
        return next((each.runtimes.get(tenant) for each in self.devices if each.name == device), None)

    def device_state(self, device: ControlledDevice, tenant: str = "") -> DeviceState:
        """The state of one device: "restarting" while its process, or that of one of its tenants, is started again; if a tenant
        is given, that of others does not count.
        """
        own = tenant and not device.process
        runtimes = [each for name, each in device.runtimes.items() if name == tenant] if own else device.distinct()
        if any(runtime.away for runtime in runtimes):
            return "restarting"
        if self.state not in _ALIVE:
            return self.state
        return self._of_all({self._states[name] for name in device.runtimes})

    async def drain(self, grace: float) -> None:
        """Become not ready; after `grace` seconds refuse new requests, and return when the last one is answered. There is no
        grace where the start is not complete, as the server was not ready; a second call has only what is left of the first's.

        Builds that are still running then are abandoned. Inferences that have not ended after half of `drain_timeout` are
        cancelled, and waited for once more as long, at most a second.
        """
        if self.state in ("closed", "lost"):
            return
        started = bool(self.repartitions)
        now = asyncio.get_running_loop().time()
        if self._refuses_at is None:
            grace = grace if started else 0.0
            self._refuses_at = now + grace
            self._lifecycle.set_state("draining")
            log.info("draining: not ready, new requests are refused in %g s", grace)
        await asyncio.sleep(max(0.0, self._refuses_at - now))
        runtimes = [runtime for device in self.devices for runtime in device.distinct()]
        for runtime in runtimes:
            runtime.stop_loading()
        if await drain(self._frontends.values(), runtimes, self.config.server.drain_timeout / 2):
            if started:
                await together(each.drained() for each in self.observers)
            log.info("drained: every request was answered")

    async def close(self) -> None:
        """Wait for work in flight, abandon builds, and release the devices: each also if another cannot be. Idempotent."""
        if self.state != "closed":
            self._lifecycle.set_state("closed")
            async with AsyncExitStack() as left:  # They are called from the last one up.
                left.push_async_callback(self.placements.free_cores)
                left.push_async_callback(self._close_devices)
                left.callback(self.placements.close)
                await together(each.close() for each in self.observers)

    async def _close_devices(self) -> None:
        async with self.granules_change:  # One in progress is completed first.
            await together(runtime.close() for device in self.devices for runtime in device.distinct())

    def _divided(self, device: ControlledDevice, granules: Mapping[str, Granules] = MappingProxyType({})) -> None:
        for each in self.observers:
            each.divided(device, granules)

    async def _log_ready(self) -> None:
        """Say what each tenant is served. On a busy machine a process may take longer to answer than a report waits."""
        for _ in range(_MOST_ASKED):
            reports = await self.reports()
            if not any(report.age for _, report in reports):
                break
        ready = "ready"
        if not self.ready:
            strict = self.config.server.strict_readiness
            ready = f"for {'server.strict_readiness, which asks for every model' if strict else 'want of models'}, not ready"
        log.info("%s: %s", ready, "; ".join(f"{tenant.name} {_served(report)}" for tenant, report in reports))
        if unserved := [tenant.name for tenant, report in reports if not report.ready]:
            log.warning("served no model, and not ready for itself: tenant %s", " and tenant ".join(unserved))

    async def _finish_lost(self, reason: str) -> None:
        await refuse_and_drain(self._frontends.values(), reason)
        self.device_gone.set()

    def _runtime_of(self, tenant: str) -> DeviceRuntime:
        """Raises NotFound for a tenant that is on no device."""
        device = self.device_of(tenant)
        if device is None:
            raise NotFound(f"{tenant}: there is no such tenant; there are {', '.join(self.tenants)}")
        return device.runtimes[tenant]


def _joined(parts: "Iterable[Mapping[str, T]]") -> dict[str, T]:
    return {name: each for part in parts for name, each in part.items()}


def _served(report: Report) -> str:
    """The models that are served with their versions, for the log."""
    versions: dict[str, list[str]] = {}
    for model in report.served:
        versions.setdefault(model.name, []).append(model.version)
    if report.age:
        return "does not say what it is served"
    return "is served " + (" and ".join(f"{name} {', '.join(each)}" for name, each in versions.items()) or "nothing")
