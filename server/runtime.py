"""What lives as long as the process: the device, the account of its granules, and every tenant's lane and worker."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from engines import Executor
from engines.priority import give_way
from partitions import Device, DeviceLost, Move, Partition, PartitionError, PartitionManager
from partitions import probe as probes
from partitions.base import Closing

from .catalog import Entry
from .config import Config, ConfigError, TenantConfig
from .desk import Desk, Report, State
from .errors import BadRequest, Conflict, NotFound, Unavailable
from .fronts.restarts import Restarts
from .keeping import open_builds
from .library import Loaded, Prepared, Read, open_library
from .needs import fit
from .overruns import GIVING_UP, INTERVAL, Oldest, slow_first
from .precedence import Precedence
from .protocol.document import show
from .tables import dotted
from .ticket import Failure, ModelKey
from .worker import Seat, Worker

log = logging.getLogger("greenlane.runtime")

UNLOADED = "unloaded"
"""Why a model is not there that was asked to go: that makes no server unready, however strict it is."""
_UNCHANGED = "; nothing was changed, and everyone is served as before"
KEPT = 5.0
"""Seconds after a large inference for which what it took of the process's memory is kept for the next."""
LOOK = 1.0
"""Seconds between two looks for engines that can be freed."""


@dataclass(frozen=True, slots=True)
class RuntimeStatistics:
    """The state, and how often the device was partitioned anew."""

    state: State
    repartitions: int


class Execution(NamedTuple):
    """A model at a version, of a tenant's, and what its executor says of itself."""

    tenant: str
    name: str
    version: str
    description: Mapping[str, object]


class Runtime:
    """Serves a configuration on a device, to tenants at their desks. Every method belongs to the event loop.

    `read` makes engines of model files and their largest batches; `tell` is told each state.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        desks: Mapping[str, Desk],
        tell: Callable[[State], None],
        read: Read | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.desks = desks
        self.manager = PartitionManager(device)
        self.builds = open_builds(config.models)
        self.library = open_library(config, device, read, self.builds)
        self.state: State = "starting"
        self.gone = asyncio.Event()
        self._tell = tell
        self._workers: dict[str, Worker] = {}
        self._precedence = Precedence()
        self._seats: dict[str, Seat] = {}
        self._served: dict[str, dict[str, Loaded]] = {name: {} for name in config.tenants}
        self._changing = {name: asyncio.Lock() for name in config.tenants}
        """Of those who change a tenant's models or partition, also while that is prepared."""
        self._seating = {name: asyncio.Lock() for name in config.tenants}
        """Of those who halt a tenant's worker and have one serve again: taken last, and for as long as that takes."""
        self._mending: set[asyncio.Future[None]] = set()
        self._broken: set[str] = set()
        self._stuck: set[str] = set()
        self._oldest = {name: Oldest() for name in config.tenants}
        self._watching: asyncio.Task[None] | None = None
        self._ordering = {name: asyncio.Lock() for name in config.tenants}
        self._loaders = ThreadPoolExecutor(max(1, len(config.tenants)), "load", give_way)
        self._repartitioning = asyncio.Lock()
        self._repartitions = 0
        self._changes: set[asyncio.Task[None]] = set()
        self._loading: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._freeing: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<Runtime {self.state}, {self.manager!r}>"

    def statistics(self) -> RuntimeStatistics:
        return RuntimeStatistics(self.state, self._repartitions)

    @property
    def ready(self) -> bool:
        """Whether new work is welcome: every model was tried, or loaded if that is asked for, and nobody asked for the end."""
        return self.state == "serving"

    async def start(self) -> None:
        """Give every tenant its partition and its memory, and begin to load the models. Raises DoesNotFit or ConfigError."""
        self._loop = asyncio.get_running_loop()
        for name, desk in self.desks.items():
            desk.open(self)
            self._seats[name] = Seat(desk.link, await asyncio.to_thread(self._pin, name, desk))
        unit, sizes = self.device.unit, self.device.granules
        await self.repartition({name: tenant.share(unit, sizes) for name, tenant in self.config.tenants.items()})
        log.info("%s: %s", self.device.describe(), self._shares())
        self._loading = asyncio.create_task(self._load_all())
        self._freeing = asyncio.create_task(self._free_engines())
        self._watching = asyncio.create_task(self._watch())

    async def loaded(self) -> None:
        """Wait until every model that is configured was tried."""
        if self._loading:
            await self._loading

    async def repartition(self, counts: Mapping[str, int]) -> Move:
        """Give these tenants these numbers of granules while everyone is served; the others keep theirs.

        New partitions are made, loaded, warmed and probed beside the old ones; then the movers pause for as long as
        their longest work in flight takes, change over, and go on. Raises DoesNotFit with the arithmetic, BadRequest for
        an unknown tenant or a count below one, Conflict naming the tenant whose work takes longer than `max_pause`; after any
        error the old plan is in force.
        """
        self._check_counts(counts)
        async with AsyncExitStack() as locks:
            await locks.enter_async_context(self._repartitioning)
            move = self.manager.plan(counts)
            for name in move.movers:
                await self._hold(self._changing[name], name)
                locks.callback(self._changing[name].release)
            workers = await asyncio.to_thread(self._prepare, move)
            before = {name: self._workers[name] for name in move.movers if name in self._workers}
            left: Iterable[Worker] = workers.values()
            try:
                async with self._halted(before):
                    self.manager.commit(move, {name: worker.partition for name, worker in workers.items()})
                    self._workers.update(workers)
                    self._repartitions += 1
                    left = before.values()
                for name in move.movers:
                    if name not in before:
                        self._serve(name)
            finally:
                await asyncio.to_thread(_close, left)
        if before:
            log.info("repartitioned: %s", self._shares())
        return move

    async def reopen(self, name: str, free: Callable[[], None] = lambda: None) -> None:
        """The tenant's desk has a new link: serve that one, once what is in flight over the old one has ended, and `free` that.

        It leads to the same memory, so the device reaches it already: pinning would stop every tenant. If that does not end
        in time this returns all the same, and the tenant is told 503 until it has.
        """
        moving = asyncio.ensure_future(self._reseat(name, free))
        self._mending.add(moving)
        moving.add_done_callback(self._mending.discard)
        if not (await asyncio.wait({moving}, timeout=self.config.server.max_pause))[0]:
            self._suspend(name, "what a process before had asked for is still running")
            moving.add_done_callback(lambda _: self._suspend(name, ""))

    async def _reseat(self, name: str, free: Callable[[], None]) -> None:
        self._workers[name].abandon()
        async with self._seating[name]:
            if self.state == "closed":
                return
            worker = self._workers[name]
            worker.abandon()
            await _ended(worker)
            self._seats[name] = self._seats[name]._replace(link=self.desks[name].link)
            self._serve(name)
            free()

    @asynccontextmanager
    async def _halted(self, workers: Mapping[str, Worker]) -> AsyncIterator[None]:
        """These tenants' workers are halted within; afterwards those that are theirs then serve, each once it can.

        Those whose inferences take long are halted first, and the others are served until then. Raises Conflict if one does
        not halt within `max_pause`: it is that one whose inference takes longer.
        """
        held: list[str] = []
        halting: dict[str, asyncio.Future[None]] = {}
        try:
            for name in workers:
                await self._hold(self._seating[name], name)
                held.append(name)
            for group in await slow_first(workers):
                halting |= {name: asyncio.wrap_future(workers[name].stop()) for name in group}
                if halting:
                    await asyncio.wait(halting.values(), timeout=self.config.server.max_pause)
                if late := [name for name, halted in halting.items() if not halted.done()]:
                    pause = f"{self.config.server.max_pause:g} s (server.max_pause)"
                    raise Conflict(f"{_an_inference(late)} for {pause}{_UNCHANGED}")
            yield
        finally:
            for name in held:
                if name not in halting:
                    self._seating[name].release()
                elif halting[name].done():
                    self._go_on(name, workers[name])
                else:  # Two would read its link.
                    halting[name].add_done_callback(partial(self._go_on, name, workers[name]))

    def _go_on(self, name: str, halted: Worker, _: object = None) -> None:
        """Serve a tenant again whose worker has halted, and let others change that."""
        halted.halt()
        if self.state != "closed":
            self._serve(name)
        self._seating[name].release()

    async def _hold(self, lock: asyncio.Lock, name: str) -> None:
        """Acquire a lock of this tenant. Raises Conflict if somebody else has it for too long."""
        try:
            async with asyncio.timeout(self.config.server.max_pause):
                await lock.acquire()
        except TimeoutError:
            why = "a model of it is being loaded or unloaded, or an inference does not end"
            raise Conflict(f"tenant {name}: {why}{_UNCHANGED}") from None

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        """Stop a ticket of a tenant, if it can be stopped."""
        if worker := self._workers.get(tenant):
            worker.cancel(slot, serial)

    async def load(self, tenant: str, name: str, override: str | None = None) -> None:
        """Load or reload a model for one tenant, all versions or none; other tenants keep what they have.

        An ensemble's steps are loaded before it if they are not, and ensembles that run the model are made again. What served
        before goes on serving until the new is ready, and if that fails. Raises NotFound for a model that is not the tenant's,
        BadRequest when a version cannot be served, with the reason. Cancelled before its turn nothing is loaded, cancelled
        later it goes on to its end.
        """
        self._check_may_call(tenant, name)
        await self._in_turn(tenant, partial(self._load, tenant, name, override))

    async def unload(self, tenant: str, name: str) -> None:
        """Stop serving a model to one tenant: requests that are in are finished, new ones are told it is unavailable.

        So are those for ensembles that run it, until it is loaded again. Raises NotFound for a model that is not the tenant's.
        Cancelled as `load` is.
        """
        self._check_may_call(tenant, name)
        await self._in_turn(tenant, partial(self._unload, tenant, name))

    async def _in_turn(self, tenant: str, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Change what a tenant is served once the changes before are made; not cancelled any more when its turn has come.

        Raises Unavailable if the server was closed before that.
        """
        ordering = self._ordering[tenant]
        await ordering.acquire()
        if self.state == "closed":
            ordering.release()
            raise Unavailable("the server is stopping")
        changing = asyncio.ensure_future(change())
        self._changes.add(changing)
        changing.add_done_callback(self._changes.discard)
        changing.add_done_callback(lambda _: ordering.release())
        await asyncio.shield(changing)

    async def _load(self, tenant: str, name: str, override: str | None) -> None:
        there = await asyncio.to_thread(self.library.names)
        if name not in there:
            raise BadRequest(f"failed to load {name!r}: not in the repository")
        steps = await asyncio.to_thread(self.library.steps, name, override)
        allowed = [step for step in steps if step in there and self.config.tenants[tenant].may_call(step)]
        missing = [step for step in allowed if not self._serves(tenant, step)]
        changed = {step for step in missing if (await self._load_alone(tenant, step, None)).served}
        loaded = await self._load_alone(tenant, name, override)
        await self._renew_ensembles(tenant, {*changed, name} if loaded.served else changed, name)
        if not loaded.served:
            raise BadRequest(f"failed to load {name!r}: {loaded.why()}")
        log.info("loaded for %s: %s", tenant, _names(loaded))

    async def _load_alone(self, tenant: str, name: str, override: str | None) -> Loaded:
        kept = self._serves(tenant, name)
        prepared = await self._read_model(tenant, name, override)
        async with self._changing[tenant]:
            loaded = await self._bind(tenant, prepared, whole=True, kept=kept)
            if loaded.served or not kept:
                await self._put(tenant, loaded)
        return loaded

    async def _renew_ensembles(self, tenant: str, changed: Collection[str], name: str) -> None:
        """Make those that run one of these models again, of what it is now; but for the one of this name, which is new.

        One that cannot be made of it is unavailable, with the reason, as it is in Triton.
        """
        for ensemble in self._ensembles(tenant, changed):
            if ensemble.name != name:
                prepared = await self._read_model(tenant, ensemble.name, ensemble.override)
                async with self._changing[tenant]:
                    await self._put(tenant, await self._bind(tenant, prepared, whole=True))

    async def _unload(self, tenant: str, name: str) -> None:
        async with self._changing[tenant]:
            if name in self._served[tenant]:
                for ensemble in self._ensembles(tenant, [name]):
                    await self._put(tenant, ensemble.stopped(f"its step {name!r} was unloaded"))
                    log.info("unavailable for %s: %s, as its step %s is unloaded", tenant, ensemble.name, name)
                await self._put(tenant, Loaded(name, [], [Entry(name, "", "UNAVAILABLE", UNLOADED)], {}))
                log.info("unloaded for %s: %s", tenant, name)

    async def reports(self) -> list[tuple[TenantConfig, Report]]:
        """What every tenant's HTTP side has counted."""
        found = await asyncio.gather(*(desk.report() for desk in self.desks.values()))
        return [(self.config.tenants[name], report) for name, report in zip(self.desks, found, strict=True)]

    def executions(self) -> list[Execution]:
        """Which way every model runs now, see `engines.Executor.describe`. Does not block."""
        found = []
        for tenant, worker in self._workers.items():
            for served in (served for loaded in self._served[tenant].values() for served in loaded.served):
                if executor := worker.executors.get(served.key):
                    found.append(Execution(tenant, served.name, served.version, executor.describe()))
        return found

    async def probe(self) -> dict[str, frozenset[int]]:
        """Run a little work in every partition and say on which units it ran."""
        async with self._repartitioning:
            return await asyncio.to_thread(probes.locate, self.manager.held)

    async def drain(self, grace: float) -> None:
        """Say that the server is not ready; `grace` seconds later refuse new work, and return when the last is answered.

        Models that are being built by then are abandoned. What has not ended after half of `drain_timeout` is stopped, and
        after as much again, or a second, it is waited for no more.
        """
        if self.state in ("closed", "lost"):
            return
        self._become("draining")
        log.info("draining: not ready from now on, new requests are refused in %g s", grace)
        await asyncio.sleep(grace)
        self.builds.close()
        limit = self.config.server.drain_timeout / 2
        emptying = asyncio.ensure_future(self._empty("the server is draining"))
        if not (await asyncio.wait({emptying}, timeout=limit))[0]:
            text = f"the server is draining, and this has not ended in {limit:g} s (server.drain_timeout)"
            log.error("inferences are stopped that have not ended in %g s, and those behind them", limit)
            for worker in self._workers.values():
                worker.abandon(Failure("stopped", text))
            if not (await asyncio.wait({emptying}, timeout=min(limit, 1.0)))[0]:
                log.error("some inferences cannot be stopped: their requests are answered without them")
                for name in self.desks:
                    self._suspend(name, text)
                return
        emptying.result()
        log.info("drained: every request was answered")

    async def close(self) -> None:
        """Finish what is in flight, but for builds, and release the device. Calling it again does nothing."""
        if self.state == "closed":
            return
        self._become("closed")
        self.builds.close()
        await self.loaded()
        async with AsyncExitStack() as locks:  # A change that has begun goes on to its end.
            everyones = (*self._ordering.values(), self._repartitioning, *self._changing.values(), *self._seating.values())
            for lock in everyones:
                await locks.enter_async_context(lock)
            for task in (self._freeing, self._watching):
                if task:
                    task.cancel()
            workers, self._workers = self._workers, {}
            await asyncio.to_thread(_close, workers.values())
            await asyncio.to_thread(self.library.close)
            for seat in self._seats.values():
                seat.pinned.close()
            for desk in self.desks.values():
                desk.close()
            self.manager.close()
            self.device.close()
            self._loaders.shutdown(wait=False)

    def lose(self, error: DeviceLost) -> None:
        """The device is lost for everyone: not ready at once, nothing new is taken, and what waits is told. Any thread.

        `gone` is set when everyone was; nothing but a new process will get the device back.
        """
        if self._loop:
            self._loop.call_soon_threadsafe(self._lose, error)

    def _lose(self, error: DeviceLost) -> None:
        if self.state != "lost":
            self._become("lost")
            log.critical("the device is lost, and this process with it: %s", error)
            self._leaving = asyncio.create_task(self._leave(f"the device is lost: {error}"))

    async def _leave(self, reason: str) -> None:
        await self._empty(reason)
        self.gone.set()

    async def _empty(self, reason: str) -> None:
        for desk in self.desks.values():
            desk.refuse(reason)
        await asyncio.gather(*(desk.empty() for desk in self.desks.values()))

    def _suspend(self, name: str, reason: str) -> None:
        """Tell a tenant's clients this until it is taken back with ""."""
        if reason:
            log.error("tenant %s is told 503: %s", name, reason)
        else:
            log.info("tenant %s is served again", name)
        self.desks[name].suspend(reason)

    async def _watch(self) -> None:
        """Look now and then how long everyone's inferences have been running, and stop those that take too long."""
        while True:
            await asyncio.sleep(INTERVAL)
            now = time.monotonic()
            for name, worker in self._workers.items():
                serial = worker.oldest
                self._look(name, worker, serial, self._oldest[name].lasts(now, serial))

    def _look(self, name: str, worker: Worker, serial: int | None, seconds: float) -> None:
        """A tenant's oldest work has been running for so long."""
        own, limit = self.config.tenants[name].max_execution, self.config.server.max_execution
        limit, key = (limit, "server.max_execution") if own is None else (own, dotted(("tenants", name, "max_execution")))
        late = bool(limit) and seconds > limit
        if name in self._stuck and not late:
            self._stuck.discard(name)
            self._suspend(name, "")
        elif late and serial is not None and seconds <= limit + GIVING_UP:
            text = f"the inference was stopped, as it had not ended in {limit:g} s, which is the limit ({key})"
            worker.overrun(serial, Failure("overrun", text))
        elif late and name not in self._stuck:
            self._stuck.add(name)
            self._suspend(name, f"an inference of tenant {name} cannot be stopped that has been running for {seconds:.0f} s")

    def _break(self, name: str, error: Exception) -> None:
        """The worker of this tenant cannot go on. Any thread."""
        if self._loop:
            self._loop.call_soon_threadsafe(self._mend, name, error)

    def _mend(self, name: str, error: Exception) -> None:
        if name not in self._broken:
            self._broken.add(name)
            self._suspend(name, f"the worker of tenant {name} failed, and is being started again: {error}")
            mending = asyncio.ensure_future(self._serve_again(name))
            self._mending.add(mending)
            mending.add_done_callback(self._mending.discard)

    async def _serve_again(self, name: str) -> None:
        """Have a tenant's worker serve again that failed, as often as it takes."""
        restarts = Restarts()
        while self.state not in ("closed", "lost"):
            now = time.monotonic()
            restarts.started(now)
            await asyncio.sleep(restarts.pause(now))
            async with self._seating[name]:
                if self.state == "closed":
                    return
                worker = self._workers[name]
                await _ended(worker)
                self._serve(name)
                stands = await asyncio.to_thread(worker.stands)
            if stands:
                self._broken.discard(name)
                self._suspend(name, "")
                return

    def _become(self, state: State) -> None:
        self.state = state
        self._tell(state)

    def _pin(self, name: str, desk: Desk) -> Closing:
        """Make a tenant's memory reachable for the device, before anybody is served. Blocks. Raises ConfigError."""
        memory = desk.link.arena.memory
        try:
            return self.device.pin(memory.address, memory.nbytes)
        except PartitionError as error:
            key = dotted(("tenants", name, "memory"))
            text = f"the device cannot be made to reach {memory.nbytes} bytes of memory; lower it: {error}"
            raise ConfigError([f"{self.config.source}: {key}: {text}"]) from error

    def _serve(self, name: str) -> None:
        worker = self._workers[name]
        worker.serve(self._seats[name])
        self.desks[name].place(worker.partition.host_cores)

    def _check_counts(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            if name not in self.config.tenants:
                raise BadRequest(f"{name}: there is no such tenant; there are {', '.join(self.config.tenants)}")
            if type(count) is not int or count < 1:
                raise BadRequest(f"{name}: {show(count)} granules; expected an integer of at least 1")

    def _prepare(self, move: Move) -> dict[str, Worker]:
        """Workers on the movers' new partitions, with all their models, ready and probed. Blocks. All or none.

        Each mover's models are set up on a thread of its own.
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
            self.lose,
            self._precedence,
            partial(self._break, name),
        )

    async def _load_all(self) -> None:
        """Load what every tenant may call, all tenants at once; ready when the last model is."""
        await asyncio.gather(*(self._load_tenant(tenant) for tenant in self.config.tenants.values()))
        if self.state == "starting":
            self._become(self._serving_state())
            ready = "ready" if self.ready else "for server.strict_readiness, which asks for every model, not ready"
            log.info("%s: %s", ready, "; ".join(f"{name} is served {self._models(name)}" for name in self.desks))

    async def _free_engines(self) -> None:
        """Free what was unloaded, an engine at a time, when no inference has run or waited for two looks in a row."""
        before = False
        while True:
            await asyncio.sleep(LOOK)
            quiet = all(worker.idle for worker in self._workers.values())
            await asyncio.to_thread(self._release_unused, quiet and before)
            before = quiet
            await self._trim()

    async def _trim(self) -> None:
        """Have every tenant's executors give back memory that was not needed lately, but for those that are being changed."""
        for name, changing in self._changing.items():
            if not changing.locked():
                async with changing:
                    if worker := self._workers.get(name):
                        await asyncio.to_thread(worker.trim, KEPT)

    def _release_unused(self, quiet: bool) -> None:
        executors = [executor for worker in list(self._workers.values()) for executor in list(worker.executors.values())]
        self.library.release_unused(executors, quiet)

    async def _load_tenant(self, tenant: TenantConfig) -> None:
        known = await asyncio.to_thread(self.library.names)
        names = [name for name in dict.fromkeys([*tenant.models, *known]) if name != "*" and tenant.may_call(name)]
        for name in names:
            self.desks[tenant.name].announce(name)
        for name in await asyncio.to_thread(self.library.in_order, names):
            if self.state != "starting":
                return
            async with self._ordering[tenant.name]:
                prepared = await self._read_model(tenant.name, name, None)
                async with self._changing[tenant.name]:
                    await self._put(tenant.name, await self._bind(tenant.name, prepared))
        if not any(self._served_names(tenant.name)):
            log.warning(
                "tenant %s is served nothing: %s", tenant.name, "every model failed" if names else "it may call no model"
            )

    async def _read_model(self, tenant: str, name: str, override: str | None) -> Prepared:
        """Read a model, which takes minutes where it has to be built: with no partition held, for what goes on meanwhile, and
        on threads that nothing else waits for. A tenant has one at a time.
        """
        self.desks[tenant].announce(name)
        loop, among = asyncio.get_running_loop(), self._served[tenant]
        return await loop.run_in_executor(self._loaders, self.library.prepare, name, override, among)

    async def _bind(self, tenant: str, prepared: Prepared, whole: bool = False, kept: bool = False) -> Loaded:
        """Bind what was read to the tenant's partition, and see whether its requests fit the tenant's memory.

        `whole` and `kept` are as in `Library.bind`.
        """
        partition = self._workers[tenant].partition
        # What computes on the host's own cores keeps the priority of the thread that bound it.
        threads = self._loaders if partition.host_cores is None else None
        loop = asyncio.get_running_loop()
        loaded = await loop.run_in_executor(threads, self.library.bind, prepared, partition, whole, kept)
        fitting = await asyncio.to_thread(fit, loaded, self.config.tenants[tenant])
        known = frozenset(loaded.told(kept))
        for line in fitting.told(kept):
            if line not in known:
                log.warning("%s", line)
        return await asyncio.to_thread(fitting.give_up) if whole and fitting.problems else fitting

    async def _put(self, tenant: str, loaded: Loaded) -> None:
        """Serve what was loaded in place of what was; the old is closed once its last request ended."""
        executors, before = self._workers[tenant].executors, self._served[tenant].get(loaded.name)
        executors.update(loaded.executors)
        self._served[tenant][loaded.name] = replace(loaded, executors={})  # Those of now are the worker's.
        settled = await self.desks[tenant].publish(loaded.name, loaded.served, loaded.problems)
        left = [executors.pop(served.key) for served in before.served] if before else []
        if settled:
            await asyncio.to_thread(_close, left)
        elif left:  # Its process died: what that had asked for may still be running.
            await self._close_halted(tenant, left)
        if self.state in ("serving", "incomplete") and self._serving_state() != self.state:
            self._become(self._serving_state())

    def _serving_state(self) -> State:
        """The state once every model was tried."""
        if not self.config.server.strict_readiness:
            return "serving"
        loaded = [each for served in self._served.values() for each in served.values()]
        failed = any(problem.reason != UNLOADED for each in loaded for problem in each.problems)
        return "incomplete" if failed else "serving"

    async def _close_halted(self, tenant: str, left: Iterable[Executor]) -> None:
        async with self._seating[tenant]:
            await _ended(self._workers[tenant])
            try:
                await asyncio.to_thread(_close, left)
            finally:
                self._serve(tenant)

    def _serves(self, tenant: str, name: str) -> bool:
        loaded = self._served[tenant].get(name)
        return bool(loaded and loaded.served)

    def _ensembles(self, tenant: str, models: Collection[str]) -> list[Loaded]:
        """Those that run one of these models, or would if it were served."""
        return [loaded for loaded in self._served[tenant].values() if not set(loaded.steps).isdisjoint(models)]

    def _check_may_call(self, tenant: str, name: str) -> None:
        if not self.config.tenants[tenant].may_call(name):
            raise NotFound(f"Request for unknown model: {name!r} is not found")

    def _served_names(self, tenant: str) -> Iterator[str]:
        return (_names(loaded) for loaded in self._served[tenant].values() if loaded.served)

    def _models(self, tenant: str) -> str:
        return " and ".join(self._served_names(tenant)) or "nothing"

    def _shares(self) -> str:
        held = self.manager.held.items()
        return ", ".join(f"{name} has {partition.size} ({_places(partition)})" for name, partition in held)


def _names(loaded: Loaded) -> str:
    return f"{loaded.name} {', '.join(served.version for served in loaded.served)}"


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


async def _ended(worker: Worker) -> None:
    """Halt a worker, without a thread that waits for it."""
    await asyncio.shield(asyncio.wrap_future(worker.stop()))
    worker.halt()


def _an_inference(names: Collection[str]) -> str:
    return f"tenant{'s' * (len(names) > 1)} {' and '.join(names)}: an inference has been running"


def _close(things: Iterable[Closing]) -> None:
    for thing in things:
        thing.close()


def _places(partition: Partition) -> str:
    return "granule " + ", ".join(map(str, partition.granules))
