"""Owns what lives as long as the process: the device, its partitions, each tenant's worker and the models."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from engines import Executor
from partitions import Device, DeviceLost, Move, Partition, PartitionManager
from partitions import probe as probes
from partitions.base import Closing

from ..config.schema import Config, TenantConfig
from ..errors import BadRequest
from ..link.messages import Failure, ModelKey
from ..protocol.json_document import show
from ..tenants.frontend import Frontend, Report, State
from ..tenants.lifecycle import Lifecycle
from ..workers.gil_priority import GilPriorities
from ..workers.supervision import Supervision
from ..workers.worker import Worker
from ..workers.worker_control import WorkerControl, hold
from .cache_paths import open_builds
from .loaded_models import Execution
from .model_loader import Read, open_model_loader
from .reclaim import free_engines
from .tenant_models import TenantModels

log = logging.getLogger("greenlane.runtime")


@dataclass(frozen=True, slots=True)
class RuntimeStatistics:
    """The state, and how often the device was partitioned."""

    state: State
    repartitions: int


class Runtime:
    """Serves a configuration on a device, to the tenants' frontends: starts, repartitions, drains and closes.

    `TenantModels` loads and unloads, `WorkerControl` halts and resumes workers, `Supervision` restarts failed ones; all share
    the dict of current workers. Each tenant has two locks, both taken by repartitions: `_changing` first, the one of
    `WorkerControl` last. Methods run on the event loop unless they say otherwise. `read` makes an engine of a model file and
    its largest batch; `publish` is called with each state of the server.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        frontends: Mapping[str, Frontend],
        publish: Callable[[State], None],
        read: Read | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.frontends = frontends
        self.manager = PartitionManager(device)
        self.builds = open_builds(config.models)
        self.model_loader = open_model_loader(config, device, read, self.builds)
        self.device_gone = asyncio.Event()
        self._lifecycle = Lifecycle(publish)
        self._priorities = GilPriorities()
        self._workers: dict[str, Worker] = {}
        self._changing = {name: asyncio.Lock() for name in config.tenants}
        """Held while a tenant's models or partition change, including the preparation."""
        self._worker_control = WorkerControl(config.source, config.server.max_pause, frontends, self._workers, self._lifecycle)
        limits = {name: config.execution_limit(name) for name in config.tenants}
        self._supervision = Supervision(
            config.server.max_pause, limits, frontends, self._workers, self._worker_control, self._lifecycle
        )
        self._models = TenantModels(
            config.tenants,
            config.server.strict_readiness,
            frontends,
            self.model_loader,
            self._workers,
            self._worker_control,
            self._changing,
            self._lifecycle,
        )
        self._repartitioning = asyncio.Lock()
        self._repartitions = 0
        self._finishing: asyncio.Task[None] | None = None
        self._freeing: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<Runtime {self.state}, {self.manager!r}>"

    def statistics(self) -> RuntimeStatistics:
        return RuntimeStatistics(self.state, self._repartitions)

    @property
    def state(self) -> State:
        """The state of the server."""
        return self._lifecycle.state

    @property
    def ready(self) -> bool:
        """As `Lifecycle.ready`."""
        return self._lifecycle.ready

    async def start(self) -> None:
        """Create all partitions, page-lock the tenants' memory, and start loading models. Raises DoesNotFit or ConfigError."""
        self._loop = asyncio.get_running_loop()
        for name, frontend in self.frontends.items():
            frontend.open(self)
            await self._worker_control.pin(self.device, name)
        unit, sizes = self.device.unit, self.device.granules
        await self.repartition({name: tenant.share(unit, sizes) for name, tenant in self.config.tenants.items()})
        log.info("%s: %s", self.device.describe(), self._shares())
        self._models.start()
        self._freeing = asyncio.create_task(free_engines(self.model_loader, self._workers, self._changing))
        self._supervision.start()

    async def loaded(self) -> None:
        """Wait until every configured model was tried."""
        await self._models.loaded()

    async def repartition(self, counts: Mapping[str, int]) -> Move:
        """Give these tenants these numbers of granules while all are served; the other tenants keep theirs.

        New partitions are created, loaded, warmed up and probed beside the old ones; then the tenants that move pause until
        their work in flight has ended, switch, and go on. Raises DoesNotFit with the arithmetic, BadRequest for an unknown
        tenant or a count below 1, Conflict naming a tenant whose work takes longer than `max_pause`. After an error the old
        partitions stay.
        """
        self._check_counts(counts)
        async with AsyncExitStack() as locks:
            await locks.enter_async_context(self._repartitioning)
            move = self.manager.plan(counts)
            for name in move.movers:
                await hold(self._changing[name], name, self.config.server.max_pause)
                locks.callback(self._changing[name].release)
            workers = await asyncio.to_thread(self._prepare, move)
            before = {name: self._workers[name] for name in move.movers if name in self._workers}
            left: Iterable[Worker] = workers.values()
            try:
                async with self._worker_control.halted(before):
                    self.manager.commit(move, {name: worker.partition for name, worker in workers.items()})
                    self._workers.update(workers)
                    self._repartitions += 1
                    left = before.values()
                for name in move.movers:
                    if name not in before:
                        self._worker_control.serve(name)
            finally:
                await asyncio.to_thread(_close, left)
        if before:
            log.info("repartitioned: %s", self._shares())
        return move

    async def replace_link(self, name: str, free: Callable[[], None] = lambda: None) -> None:
        """As `Supervision.replace_link`."""
        await self._supervision.replace_link(name, free)

    async def load(self, tenant: str, name: str, override: str | None = None) -> None:
        """As `TenantModels.load`."""
        await self._models.load(tenant, name, override)

    async def unload(self, tenant: str, name: str) -> None:
        """As `TenantModels.unload`."""
        await self._models.unload(tenant, name)

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        """Cancel a tenant's ticket, if it can be."""
        if worker := self._workers.get(tenant):
            worker.cancel(slot, serial)

    async def reports(self) -> list[tuple[TenantConfig, Report]]:
        """The report of each tenant's HTTP side."""
        found = await asyncio.gather(*(frontend.report() for frontend in self.frontends.values()))
        return [(self.config.tenants[name], report) for name, report in zip(self.frontends, found, strict=True)]

    def executions(self) -> list[Execution]:
        """How each model runs now; see `engines.Executor.describe`. Does not block."""
        return self._models.executions()

    async def probe(self) -> dict[str, frozenset[int]]:
        """Run a small kernel in each partition; the units on which it ran, by tenant."""
        async with self._repartitioning:
            return await asyncio.to_thread(probes.locate, self.manager.held)

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
        self.builds.close()
        limit = self.config.server.drain_timeout / 2
        draining = asyncio.ensure_future(self._refuse_and_drain("the server is draining"))
        if not (await asyncio.wait({draining}, timeout=limit))[0]:
            text = f"the server is draining, and this had not ended after {limit:g} s (server.drain_timeout)"
            log.error("drain: cancelling inferences that have not ended after %g s, and those queued behind them", limit)
            for worker in self._workers.values():
                worker.abandon(Failure("stopped", text))
            if not (await asyncio.wait({draining}, timeout=min(limit, 1.0)))[0]:
                log.error("drain: some inferences cannot be cancelled; their requests are answered 503")
                for name in self.frontends:
                    self._supervision.suspend(name, text)
                return
        draining.result()
        log.info("drained: every request was answered")

    async def close(self) -> None:
        """Wait for work in flight, abandon builds, and release the device. Idempotent."""
        if self.state == "closed":
            return
        self._lifecycle.set_state("closed")
        self.builds.close()
        await self.loaded()
        async with AsyncExitStack() as locks:  # Changes in progress are completed first.
            every_lock = (
                *self._models.ordering.values(),
                self._repartitioning,
                *self._changing.values(),
                *self._worker_control.locks.values(),
            )
            for lock in every_lock:
                await locks.enter_async_context(lock)
            if self._freeing:
                self._freeing.cancel()
            self._supervision.close()
            workers = list(self._workers.values())
            self._workers.clear()
            await asyncio.to_thread(_close, workers)
            await asyncio.to_thread(self.model_loader.close)
            self._worker_control.close()
            for frontend in self.frontends.values():
                frontend.close()
            self.manager.close()
            self.device.close()
            self._models.close()

    def on_device_lost(self, error: DeviceLost) -> None:
        """The device is lost for all tenants: not ready, new requests are refused, queued ones fail. Any thread.

        `device_gone` is set when all requests are answered; only a new process can use the device again.
        """
        if self._loop:
            self._loop.call_soon_threadsafe(self._on_lost, error)

    def _on_lost(self, error: DeviceLost) -> None:
        if self.state != "lost":
            self._lifecycle.set_state("lost")
            log.critical("the device is lost, this process will exit: %s", error)
            self._finishing = asyncio.create_task(self._finish_lost(f"the device is lost: {error}"))

    async def _finish_lost(self, reason: str) -> None:
        await self._refuse_and_drain(reason)
        self.device_gone.set()

    async def _refuse_and_drain(self, reason: str) -> None:
        for frontend in self.frontends.values():
            frontend.refuse(reason)
        await asyncio.gather(*(frontend.drained() for frontend in self.frontends.values()))

    def _on_worker_error(self, name: str, error: Exception) -> None:
        """A tenant's worker has failed. Any thread."""
        if self._loop:
            self._loop.call_soon_threadsafe(self._supervision.restart_worker, name, error)

    def _check_counts(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            if name not in self.config.tenants:
                raise BadRequest(f"{name}: there is no such tenant; there are {', '.join(self.config.tenants)}")
            if type(count) is not int or count < 1:
                raise BadRequest(f"{name}: {show(count)} granules; expected an integer of at least 1")

    def _prepare(self, move: Move) -> dict[str, Worker]:
        """Workers on the new partitions, with all models ready and the partitions probed; all or none. Blocks.

        The models of each tenant are set up on a separate thread.
        """
        carved = self.manager.carve(move)
        workers: dict[str, Worker] = {}
        try:
            probes.check(carved, probes.locate(carved))
            with ThreadPoolExecutor(max(1, len(carved)), "rebinding") as threads:
                begun = {name: threads.submit(self._worker, name, partition) for name, partition in carved.items()}
            workers = {name: future.result() for name, future in begun.items() if not future.exception()}
            for future in begun.values():
                future.result()
        except BaseException:
            _close(workers.values())
            self.manager.discard(carved)
            raise
        return workers

    def _worker(self, name: str, partition: Partition) -> Worker:
        before = self._workers.get(name)
        return Worker(
            partition,
            _rebind(before.executors if before else {}, partition),
            self.on_device_lost,
            self._priorities,
            partial(self._on_worker_error, name),
        )

    def _shares(self) -> str:
        held = self.manager.held.items()
        return ", ".join(f"{name} has {partition.size} ({_places(partition)})" for name, partition in held)


def _rebind(executors: Mapping[ModelKey, Executor], partition: Partition) -> dict[ModelKey, Executor]:
    bound: dict[ModelKey, Executor] = {}
    try:
        for key, executor in executors.items():
            bound[key] = executor.rebind(partition)
    except BaseException:
        for executor in bound.values():
            executor.close()
        raise
    return bound


def _close(things: Iterable[Closing]) -> None:
    for thing in things:
        thing.close()


def _places(partition: Partition) -> str:
    return f"granule{'s' * (len(partition.granules) != 1)} {', '.join(map(str, partition.granules))}"
