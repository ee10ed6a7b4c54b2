"""What lives as long as the process: the device, the account of its granules, and every tenant's lane and worker."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from engines import Engine, Executor, load_engine
from partitions import Device, Move, Partition, PartitionManager
from partitions import probe as probes

from .catalog import Catalog, Entry
from .config import Config, TenantConfig
from .errors import BadRequest, NotFound
from .lane import Lane
from .library import Library, Loaded
from .mailbox import Mailbox
from .protocol.request import Limits
from .repository import Repository
from .scheduler import Scheduler
from .slots import SlotPool
from .tenancy import Tenancy, Tenant
from .ticket import Done, ModelKey
from .worker import Worker

log = logging.getLogger("greenlane.runtime")

HORIZON = 200_000
"""Nanoseconds of short works that may be handed to a worker ahead: a few times what the way there and back takes."""

State = Literal["starting", "serving", "draining", "closed"]


@dataclass(frozen=True, slots=True)
class RuntimeStatistics:
    """The state, and how often the device was partitioned anew."""

    state: State
    repartitions: int


class Runtime:
    """Serves a configuration on a device; `read` makes engines of model files. Every method belongs to the event loop."""

    def __init__(self, config: Config, device: Device, read: Callable[[Path], Engine] | None = None) -> None:
        self.config = config
        self.device = device
        self.manager = PartitionManager(device)
        self.library = Library(
            Repository(config.models.repository, config.models.max_batches), read or partial(load_engine, device=device)
        )
        self.tenancy = Tenancy([_tenant(c) for c in config.tenants.values()], config.server.default_tenant)
        self.limits = Limits(config.server.max_json_tensor, config.server.max_body)
        self.state: State = "starting"
        self._workers: dict[str, Worker] = {}
        self._changing = {name: asyncio.Lock() for name in config.tenants}
        self._repartitioning = asyncio.Lock()
        self._mailboxes: dict[str, Mailbox[Done]] = {}
        self._repartitions = 0
        self._loading: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Runtime {self.state}, {self.manager!r}>"

    def statistics(self) -> RuntimeStatistics:
        return RuntimeStatistics(self.state, self._repartitions)

    @property
    def ready(self) -> bool:
        """Whether new work is welcome: every model was tried, and nobody asked the server to stop."""
        return self.state == "serving"

    async def start(self) -> None:
        """Give every tenant its partition and begin to load the models. Raises DoesNotFit or ConfigError."""
        loop = asyncio.get_running_loop()
        self._mailboxes = {tenant.name: Mailbox(loop, tenant.lane.hear) for tenant in self.tenancy}
        for tenant in self.tenancy:
            tenant.lane.slots.pin = self.device.pin
        sizes, unit = self.device.granules, self.device.unit
        await self.repartition({t.name: t.config.share(unit, sizes) for t in self.tenancy})
        log.info("%s: %s", self.device.describe(), self._shares())
        self._loading = asyncio.create_task(self._load_all())

    async def loaded(self) -> None:
        """Wait until every model that is configured was tried."""
        if self._loading:
            await self._loading

    async def repartition(self, counts: Mapping[str, int]) -> Move:
        """Give these tenants these numbers of granules while everyone is served; the others keep theirs.

        New partitions are made, loaded, warmed and probed beside the old ones; then the movers pause for as long as
        their longest work in flight takes, change over, and go on. Raises DoesNotFit with the arithmetic, BadRequest for
        an unknown tenant or a count below one; after any error the old plan is in force.
        """
        self._check_counts(counts)
        async with AsyncExitStack() as locks:
            await locks.enter_async_context(self._repartitioning)
            move = self.manager.plan(counts)
            for name in move.movers:
                await locks.enter_async_context(self._changing[name])
            workers = await asyncio.to_thread(self._prepare, move)
            movers = [self.tenancy.tenants[name].lane for name in move.movers]
            try:
                for lane in movers:
                    lane.pause()
                for lane in movers:
                    await lane.quiet()
                self.manager.commit(move, {name: worker.partition for name, worker in workers.items()})
                left = [lane.swap(workers[lane.name]) for lane in movers]
            except BaseException:
                left = list(workers.values())
                raise
            else:
                self._workers.update(workers)
                self._repartitions += 1
            finally:
                for lane in movers:
                    lane.resume()
                await asyncio.to_thread(_close, left)
        return move

    async def load(self, tenant: Tenant, name: str, override: str | None = None) -> None:
        """Load or reload a model for one tenant; other tenants keep what they have.

        What served before goes on serving until the new is ready, and if that fails. Raises NotFound for a model that is
        not the tenant's, BadRequest when there is nothing to serve, with the reason.
        """
        _check_may_call(tenant, name)
        if name not in await asyncio.to_thread(self.library.names):
            raise BadRequest(f"failed to load {name!r}: not in the repository")
        async with self._changing[tenant.name]:
            loaded = await self._load(tenant, name, override)
            if loaded.served or not tenant.catalog.versions(name):
                await self._put(tenant, loaded)
        if not loaded.served:
            reason = "; ".join(problem.reason for problem in loaded.problems)
            raise BadRequest(f"failed to load {name!r}: {reason}")

    async def unload(self, tenant: Tenant, name: str) -> None:
        """Stop serving a model to one tenant: requests that are in are finished, new ones are told it is unavailable.

        Raises NotFound for a model that is not the tenant's.
        """
        _check_may_call(tenant, name)
        async with self._changing[tenant.name]:
            if tenant.catalog.knows(name):
                await self._put(tenant, Loaded(name, [], [Entry(name, "", "UNAVAILABLE", "unloaded")], {}))

    async def probe(self) -> dict[str, frozenset[int]]:
        """Run a little work in every partition and say on which units it ran."""
        async with self._repartitioning:
            return await asyncio.to_thread(probes.locate, self.manager.held)

    async def drain(self, grace: float) -> None:
        """Say that the server is not ready; `grace` seconds later refuse new work, and return when the last is answered."""
        if self.state == "closed":
            return
        self.state = "draining"
        log.info("draining: not ready from now on, new requests are refused in %g s", grace)
        await asyncio.sleep(grace)
        for tenant in self.tenancy:
            tenant.lane.refusing = "the server is draining"
        for tenant in self.tenancy:
            await tenant.lane.empty()
        log.info("drained: every request was answered")

    async def close(self) -> None:
        """Finish what is in flight and release the device. Calling it again does nothing."""
        self.state = "closed"
        await self.loaded()
        workers, self._workers = self._workers, {}
        await asyncio.to_thread(_close, list(workers.values()))
        for tenant in self.tenancy:
            tenant.lane.slots.close()
        self.manager.close()
        self.device.close()

    def _check_counts(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            if name not in self.tenancy.tenants:
                raise BadRequest(f"{name}: there is no such tenant; there are {', '.join(self.tenancy.tenants)}")
            if type(count) is not int or count < 1:
                raise BadRequest(f"{name}: {count!r} granules; expected an integer of at least 1")

    def _prepare(self, move: Move) -> dict[str, Worker]:
        """Workers on the movers' new partitions, with all their models, warm and probed. Blocks. All or none."""
        carved = self.manager.carve(move)
        workers: dict[str, Worker] = {}
        try:
            probes.check(carved, probes.locate(carved))
            for name, partition in carved.items():
                workers[name] = self._worker(name, partition)
        except BaseException:
            _close(workers.values())
            self.manager.discard(carved)
            raise
        return workers

    def _worker(self, name: str, partition: Partition) -> Worker:
        before = self._workers.get(name)
        executors = _rebind(before.executors if before else {}, partition)
        worker = Worker(partition, executors, self.tenancy.tenants[name].lane.slots.__getitem__, self._mailboxes[name].put)
        worker.start()
        return worker

    async def _load_all(self) -> None:
        """Load what every tenant may call, all tenants at once; ready when the last model is."""
        await asyncio.gather(*(self._load_tenant(tenant) for tenant in self.tenancy))
        if self.state == "starting":
            self.state = "serving"
            log.info("ready: %s", ", ".join(f"{tenant.name} is served {_names(tenant)}" for tenant in self.tenancy))

    async def _load_tenant(self, tenant: Tenant) -> None:
        known = await asyncio.to_thread(self.library.names)
        names = [
            name for name in dict.fromkeys([*tenant.config.models, *known]) if name != "*" and tenant.config.may_call(name)
        ]
        for name in names:
            tenant.catalog.announce(name)
        for name in names:
            if self.state != "starting":
                return
            async with self._changing[tenant.name]:
                await self._put(tenant, await self._load(tenant, name, None))

    async def _load(self, tenant: Tenant, name: str, override: str | None) -> Loaded:
        tenant.catalog.announce(name)
        return await asyncio.to_thread(self.library.load, name, self._workers[tenant.name].partition, override)

    async def _put(self, tenant: Tenant, loaded: Loaded) -> None:
        """Serve what was loaded in place of what was; the old is closed once its last request ended."""
        executors = self._workers[tenant.name].executors
        left = [served.key for served in tenant.catalog.served() if served.name == loaded.name]
        executors.update(loaded.executors)
        tenant.catalog.put(loaded.name, loaded.served, loaded.problems)
        for key in left:
            await tenant.lane.forgotten(key)
            await asyncio.to_thread(executors.pop(key).close)

    def _shares(self) -> str:
        held = self.manager.held.items()
        return ", ".join(f"{name} has {partition.size} ({_places(partition)})" for name, partition in held)


def _tenant(config: TenantConfig) -> Tenant:
    return Tenant(config, Catalog(), Lane(config.name, Scheduler(config.queue, config.in_flight, HORIZON), SlotPool()))


def _names(tenant: Tenant) -> str:
    return " and ".join(f"{served.name} {served.version}" for served in tenant.catalog.served()) or "nothing"


def _check_may_call(tenant: Tenant, name: str) -> None:
    if not tenant.config.may_call(name):
        raise NotFound(f"Request for unknown model: {name!r} is not found")


def _rebind(executors: Mapping[ModelKey, Executor], partition: Partition) -> dict[ModelKey, Executor]:
    bound: dict[ModelKey, Executor] = {}
    try:
        for key, executor in executors.items():
            bound[key] = executor.engine.bind(partition)
    except BaseException:
        for executor in bound.values():
            executor.close()
        raise
    return bound


def _close(workers: Iterable[Worker | None]) -> None:
    for worker in workers:
        if worker:
            worker.close()


def _places(partition: Partition) -> str:
    return "granule " + ", ".join(map(str, partition.granules))
