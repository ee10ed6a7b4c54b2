"""The device side of some tenants: the device, their partitions, workers and models. `server.control` decides what it does."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from engines import EngineError
from partitions import Device, DeviceLost, DeviceUnavailable, PartitionError, PartitionManager
from partitions import probe as probes
from partitions.plan import Granules
from partitions.strain import MOST, Strain, Strained

from ..accounts.meter import Meter, Place
from ..accounts.usage import Report, TenantUsages
from ..config.schema import Config
from ..config.tenant import TenantConfig
from ..control.descriptions import AS_CONFIGURED, AtStart, DeviceInfo
from ..errors import Conflict, NotFound
from ..link.messages import Failure, ModelKey
from ..tenants.frontend import Frontend, Lifecycle, State
from ..workers.gil_priority import GilPriorities
from ..workers.placement import Placement, close_all
from ..workers.straining import Straining
from ..workers.supervision import Supervision
from ..workers.worker import Worker
from ..workers.worker_control import WorkerControl
from .ahead import open_builds
from .budget import bound_executors
from .model_loader import Read, open_model_loader
from .models import Models
from .moves import PartitionMoves
from .placements import Placements
from .tenant_locks import TenantLocks
from .tenant_models import OnLoading, TenantModels

log, models_log = logging.getLogger("greenlane.runtime"), logging.getLogger("greenlane.models")
T = TypeVar("T")

KEPT = 5.0
"""Seconds for which the host memory of a large inference is kept for the next one."""
CHECK_INTERVAL = 1.0
"""Seconds between two checks for engines that can be freed."""


class Runtime:
    """Owns the device side of the tenants that have a frontend here; see `server.control.device_runtime` for the contract.

    `PartitionMoves` moves tenants to other granules, `TenantModels` loads and unloads, `WorkerControl` halts and resumes
    workers, `Supervision` restarts failed ones; all share `workers`, the current one of each tenant. Of a tenant's three locks,
    all taken by moves, two are in `TenantLocks`, and the last in `WorkerControl`. Methods run on the event loop unless they say
    otherwise.
    `config` has this device alone; it is read here and not kept, as a reload sends what it changes (`use_models`,
    `adopt`). `read` makes an engine of a model file and its largest batch; `publish` is called with each state of this side,
    and `on_lost` with the reason when the device is lost. `pages` are descriptors of tenants' activity pages
    (`link.activity`), which it closes; `placements.set_page` changes them. `on_stuck` is called as `Supervision` says.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        frontends: Mapping[str, Frontend],
        publish: Callable[[State], None],
        on_lost: Callable[[str], None],
        read: Read | None = None,
        on_loading: OnLoading = lambda _: None,
        pages: Mapping[str, int] = MappingProxyType({}),
        on_stuck: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.device = device
        self.frontends = frontends
        self._tenants = dict(config.tenants)
        self._max_execution = config.server.max_execution
        self._max_pause = max_pause = config.server.max_pause
        self._paces_loads = config.models.paced_loads
        self.manager = PartitionManager(device)
        self._lifecycle = Lifecycle(publish)
        self.builds = open_builds(config.models, lambda: self._lifecycle.state == "starting")
        self.model_loader = open_model_loader(config, device, read, self.builds, frontends)
        self.model_loader.on_lost = self.on_device_lost
        self._on_lost = on_lost
        self._priorities = GilPriorities()
        self.workers: dict[str, Worker] = {}
        self._epoch = time.monotonic_ns()
        self._meters: dict[str, Meter] = {}
        """By tenant, those that have gone included: what they used still has to be reported."""
        self._locks = TenantLocks(frontends)
        self._worker_control = WorkerControl(config.source, max_pause, frontends, self.workers, self._lifecycle)
        numbers = {name: number for number, name in enumerate(config.tenants)}
        self.placements = Placements(device, self.workers, self._locks, dict(pages), numbers, max_pause)
        self.moves = PartitionMoves(
            self.manager, self.workers, self._worker_control, self._locks, max_pause, self._make_worker, self.placements
        )
        limits = {name: config.execution_limit(name) for name in frontends}
        self._supervision = Supervision(
            max_pause, limits, frontends, self.workers, self._worker_control, self._lifecycle, on_stuck
        )
        self.tenant_models = TenantModels(
            {name: config.tenants[name] for name in frontends},
            config.server.strict_readiness,
            frontends,
            self.model_loader,
            self.workers,
            self._worker_control,
            self._locks,
            self._lifecycle,
            on_loading,
            self.placements,
        )
        self.models = Models(self.tenant_models, frontends, self.model_loader)
        self._placing = asyncio.Lock()
        self._freeing: asyncio.Task[None] | None = None
        self._looking: asyncio.Future[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def away(self) -> bool:
        return False

    @property
    def processes(self) -> int:
        return 1

    async def open(self) -> DeviceInfo:
        device = self.device
        moves = await asyncio.to_thread(device.bandwidth)
        said = device.kind, device.describe(), device.unit, tuple(device.granules), device.address, device.shared
        return DeviceInfo(*said, moves)

    async def start(
        self,
        granules: Mapping[str, Granules],
        models: Mapping[str, Sequence[str]] = MappingProxyType({}),
        at_start: AtStart = AS_CONFIGURED,
    ) -> dict[str, frozenset[int] | None]:
        """As `DeviceRuntime.start`; `models` are lists of tenants that differ from those of the configuration."""
        self.models.set(models)
        self._loop = asyncio.get_running_loop()
        if self._paces_loads and not self.device.shared:  # Under MPS other tenants feel nothing of them.
            await asyncio.to_thread(self._pace_loads)
        for name, frontend in self.frontends.items():
            frontend.open(self)
            await self._worker_control.pin(self.device, name)
        await self._place(granules)
        self.tenant_models.start(at_start)
        self._freeing = asyncio.create_task(self._free_unused())
        self._supervision.start()
        return {name: partition.host_cores for name, partition in self.manager.held.items()}

    async def loaded(self) -> None:
        await self.tenant_models.loaded()

    async def adopt(
        self,
        name: str,
        granules: Granules,
        beyond: int,
        models: Sequence[str] | None,
        config: TenantConfig,
    ) -> None:
        """Serve one tenant more, whose frontend has just come: give it a partition, page-lock its memory, and load its models.

        `models` is its list if that differs from the one of the configuration. Numbers of its models' loads are above `beyond`.
        Raises as `start` does; `release` it then.
        """
        self._tenants[name] = config
        self._locks.add(name)
        self._worker_control.add(name)
        self._supervision.add(name, config.execution_limit(self._max_execution))
        self.tenant_models.add(config if models is None else config.with_models(models))
        self.frontends[name].open(self)
        await self._worker_control.pin(self.device, name)
        await self._place({name: granules})
        self.model_loader.number_beyond(beyond)
        await self.tenant_models.load_tenant(name, self.models.options)

    async def release(self, name: str) -> None:
        """Serve a tenant no more, and free all that it has here. Nothing of it is in flight. Does nothing if it is not here."""
        if name not in self._locks.changing:
            return
        if (worker := self.workers.get(name)) and worker.pace:
            worker.pace.hurry()
        async with self.tenant_models.ordering[name], self._locks.both(name), self._worker_control.locks[name]:
            await self.placements.remove(name)
            if worker := self.workers.pop(name, None):
                await asyncio.shield(asyncio.wrap_future(worker.stop()))
                await asyncio.to_thread(worker.close)
            self.manager.remove(name)
        self._supervision.remove(name)
        self.tenant_models.remove(name)
        self._locks.remove(name)
        await self._worker_control.remove(name)
        self.frontends[name].close()

    def name_models(self, tenant: str, keys: Mapping[ModelKey, ModelKey]) -> None:
        """Tickets may name a tenant's models by these keys too: each is followed by the key of the model."""
        executors = self.workers[tenant].executors
        executors |= {other: executors[key] for other, key in keys.items()}

    def forget_keys(self, tenant: str, keys: Iterable[ModelKey]) -> None:
        """Undo `name_models`, when no ticket names a model so any more."""
        for key in keys:
            self.workers[tenant].executors.pop(key, None)

    def _pace_loads(self) -> None:
        """Blocks."""
        try:
            self.device.loads.open()
        except DeviceUnavailable as error:
            log.warning("while a network is loaded for the first time, all tenants' inferences are slower: %s", error)

    async def _place(self, granules: Mapping[str, Granules]) -> None:
        """Give tenants their first partitions. Those of tenants that come together, one after the other."""
        async with self._placing:
            try:
                await self.moves.prepare(granules)
                await self.moves.switch()
            except BaseException:
                await self.moves.discard()
                raise

    async def replace_link(self, name: str, free: Callable[[], None] = lambda: None) -> None:
        """As `Supervision.replace_link`."""
        await self._supervision.replace_link(name, free)

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        """Cancel a tenant's ticket, if it can be."""
        if worker := self.workers.get(tenant):
            worker.cancel(slot, serial)

    async def usage(self) -> Report:
        for name, worker in self.workers.items():  # So that models that have not run yet are there too.
            for key in list(worker.executors):
                self._meters[name].counter(key, Place(worker.partition.size))
        energy = await asyncio.to_thread(self.device.energy) if self._lifecycle.state != "closed" else None
        used = [TenantUsages(name, meter.usages()) for name, meter in self._meters.items()]
        return Report(self._epoch, used, energy)

    async def probe(self, seconds: float) -> dict[str, probes.Placement]:
        # A shared device has one tenant in each process: it holds one partition at a time, so several would never be together.
        partitions = {**self.manager.held, **self.moves.prepared}
        looks: dict[str, Callable[[], probes.Placement]] = {
            name: partial(each.hold, seconds) if self.device.shared else each.locate for name, each in partitions.items()
        }
        return {name: await self._look(name, look, seconds) for name, look in looks.items()}

    async def strain(self, tenant: str, kind: Strain, seconds: float) -> Strained:
        if not (partition := self.manager.held.get(tenant)):
            raise NotFound(f"tenant {tenant} has no partition here")
        meter = self._meters.setdefault(tenant, Meter())
        straining = Straining(kind, seconds, partition, lambda: self.workers.get(tenant), meter)

        def strain() -> Strained:
            try:
                return partition.strain(kind, seconds, straining.before)
            finally:
                straining.finish()

        return await self._look(tenant, strain, seconds)

    async def _look(self, tenant: str, look: Callable[[], T], seconds: float) -> T:
        """Run `look` in a thread, after an earlier look has ended: one that an inference blocks is not given up, and keeps its
        thread until then. Raises Conflict after `max_pause`.
        """
        limit = self._max_pause + seconds
        try:
            async with asyncio.timeout(limit):
                if self._looking:
                    await asyncio.wait({self._looking})
                self._looking = looking = asyncio.ensure_future(asyncio.to_thread(look))
                return await asyncio.shield(looking)
        except TimeoutError as error:
            raise Conflict(
                f"tenant {tenant}: an inference keeps its partition from being looked at for more than {limit:g} s "
                "(server.max_pause); try again when it has ended"
            ) from error

    def stop_loading(self) -> None:
        if self._lifecycle.state not in ("closed", "lost"):
            self._lifecycle.set_state("draining")
        self._hurry_loads()

    def _hurry_loads(self) -> None:
        self.device.loads.hurry()
        for worker in self.workers.values():
            if worker.pace:
                worker.pace.hurry()
        self.builds.close()

    def abandon(self, reason: str) -> None:
        for worker in self.workers.values():
            worker.abandon(Failure("stopped", reason))

    async def close(self) -> None:
        if self._lifecycle.state == "closed":
            return
        self._lifecycle.set_state("closed")
        self._hurry_loads()
        await self.loaded()
        async with AsyncExitStack() as locks:  # Changes in progress are completed first.
            changing = *self.tenant_models.ordering.values(), *self._locks.changing.values(), *self._locks.paging.values()
            for lock in (*changing, *self._worker_control.locks.values()):
                await locks.enter_async_context(lock)
            if self._freeing:
                self._freeing.cancel()
            self._supervision.close()
            await self.placements.close()
            if self._looking:  # A strain ends by itself, and before its partition is closed.
                await asyncio.wait({self._looking}, timeout=MOST)
            workers = list(self.workers.values())
            self.workers.clear()
            await asyncio.to_thread(close_all, workers)
            await asyncio.to_thread(self.model_loader.close)
            self._worker_control.close()
            for frontend in self.frontends.values():
                frontend.close()
            self.manager.close()
            self.device.close()
            self.tenant_models.close()

    def on_device_lost(self, error: DeviceLost) -> None:
        """The device is lost for all tenants; only a new process can use it again. Any thread."""
        if self._loop:
            self._loop.call_soon_threadsafe(self._set_lost, error)

    def _set_lost(self, error: DeviceLost) -> None:
        if self._lifecycle.state != "lost":
            self._lifecycle.set_state("lost")
            self._on_lost(str(error))

    def _on_worker_error(self, name: str, error: Exception) -> None:
        """A tenant's worker has failed. Any thread."""
        if self._loop:
            self._loop.call_soon_threadsafe(self._supervision.restart_worker, name, error)

    def _make_worker(self, name: str, home: Placement) -> Worker:
        on_error = partial(self._on_worker_error, name)
        meter = self._meters.setdefault(name, Meter())
        worker = Worker(home, self.on_device_lost, self._priorities, on_error, meter=meter)
        worker.pace = self.placements.pace(name)
        return worker

    async def _free_unused(self) -> None:
        """Free memory that executors have not used for a while, and engines of unloaded models, these one at a time and when no
        inference was queued or ran at two checks in a row. Runs until it is cancelled.
        """
        before = False
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            quiet = all(worker.idle for worker in self.workers.values())
            await asyncio.to_thread(self.model_loader.release_unused, bound_executors(self.workers), quiet and before)
            before = quiet
            for name in list(self.workers):
                if not self._locks.held(name):  # Otherwise its models are changing.
                    await self._trim(name)

    async def _trim(self, name: str) -> None:
        """Failures are logged: the memory of other tenants is freed all the same."""
        async with self._locks.both(name):
            if worker := self.workers.get(name):
                try:
                    await asyncio.to_thread(worker.trim, KEPT)
                except (EngineError, PartitionError) as error:
                    models_log.warning("unused memory of %s was not freed: %s", name, error)
