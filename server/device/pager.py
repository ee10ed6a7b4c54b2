"""Keeps each tenant's models within its budget of the device's memory: pages idle ones out, and brings them back.

A model that is paged out stays in the catalog. Its executor in the worker is a `PagedExecutor`, which defers the model's
tickets as an executor does that prepares itself for their shapes: they wait with their deadlines while others go ahead. The
first of them asks for the model, which is then read and bound again on a thread of its tenant.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import NamedTuple

from engines import Engine, EngineError, Executor
from engines.memory import added
from engines.thread_priority import lower_priority
from partitions import PartitionError

from ..config.tenant import TenantConfig
from ..control.descriptions import TenantMemory
from ..errors import RequestError, Unavailable
from ..link.messages import ModelKey
from ..tenants.frontend import Frontend, Lifecycle
from ..workers.placement import close_all
from ..workers.worker import Worker
from .budget import Claim, bound_executors, label, missing, model_memory, refusal, shared_in, sized, taken, taken_more
from .loaded_model import LoadedModels, Source
from .model_loader import ModelLoader
from .paged_executor import PagedExecutor
from .placements import Placements

log = logging.getLogger("greenlane.models")

PATIENCE = 10.0
"""Seconds to wait for room that there may be soon."""
RETRY = 0.02
"""Seconds between two looks for it. The tenant's lock is free meanwhile."""


class OverBudget(Unavailable):
    """A model does not fit the tenant's budget; the text has the arithmetic."""


class NoRoomYet(OverBudget):
    """It may fit once another model of the tenant has no requests, and can be paged out."""


class BeingLoaded(OverBudget):
    """The same once another one has been loaded."""


class Reservation:
    """Memory for a model that is being loaded, which is not in the worker yet."""

    def __init__(self, label: str) -> None:
        self.claim = Claim(label, {})

    def end(self) -> None:
        """The model is in the worker, or will not be."""
        self.claim = self.claim._replace(memory={})


@dataclass(slots=True)
class Pages:
    """One tenant's reservations, the models that must stay although nothing uses them yet, and what was counted.

    `since` is when each model came, on the clock of `time.monotonic_ns`: one that has just come counts as just used. `turn` is
    held by what waits for room, so that nothing that came later takes it. Taken before `TenantLocks.paging`.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    reservations: list[Reservation] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)
    since: dict[ModelKey, int] = field(default_factory=dict)
    ins: int = 0
    outs: int = 0
    in_seconds: float = 0.0
    out_seconds: float = 0.0


class Pager:
    """Belongs to the event loop, except `request`. `tenants`, `frontends` and `workers` are the current ones.

    `locks` are `TenantLocks.paging`.
    `loading` is called with a tenant and a model that is read and bound within the block.
    """

    def __init__(
        self,
        tenants: Mapping[str, TenantConfig],
        served: LoadedModels,
        frontends: Mapping[str, Frontend],
        model_loader: ModelLoader,
        workers: Mapping[str, Worker],
        locks: Mapping[str, asyncio.Lock],
        lifecycle: Lifecycle,
        loading: Callable[[str, str], AbstractContextManager[None]],
        placements: Placements,
    ) -> None:
        self._tenants = tenants
        self._served = served
        self._frontends = frontends
        self._model_loader = model_loader
        self._workers = workers
        self.locks = locks
        self._lifecycle = lifecycle
        self._loading = loading
        self._placements = placements
        self._pages = {name: Pages() for name in tenants}
        self._requested: dict[tuple[str, ModelKey], Future[None]] = {}
        self._requesting = Lock()
        self._threads = ThreadPoolExecutor(max(1, len(tenants)), "paging", lower_priority)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Take requests for models from now on, on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Bring nothing back any more; nothing is being paged."""
        self._threads.shutdown(wait=False)

    def add(self, tenant: str) -> None:
        """A tenant without models has come."""
        self._pages[tenant] = Pages()

    def remove(self, tenant: str) -> None:
        """This tenant has gone."""
        self._pages.pop(tenant, None)

    def memory(self) -> list[TenantMemory]:
        """What each tenant's models take now."""
        found = []
        for name, worker in self._workers.items():
            if (pages := self._pages.get(name)) is not None:
                models = model_memory(worker, self._placements.of(name).adds)
                used, seconds = sum(each.nbytes for each in models), (round(pages.in_seconds, 3), round(pages.out_seconds, 3))
                limit = self._tenants[name].device_memory
                found.append(TenantMemory(name, limit, used, pages.ins, pages.outs, *seconds, models))
        return found

    @contextmanager
    def reserving(self, tenant: str, label: str) -> Iterator[Reservation]:
        """Within the block memory can be reserved for a model that is being loaded, by `make_room`."""
        reservation, reservations = Reservation(label), self._pages[tenant].reservations
        reservations.append(reservation)
        try:
            yield reservation
        finally:
            reservations.remove(reservation)

    @contextmanager
    def keeping(self, tenant: str, names: Collection[str]) -> Iterator[None]:
        """Within the block these models are not paged out."""
        kept = self._pages[tenant].kept
        kept.update(names)
        try:
            yield
        finally:
            kept.subtract(names)

    async def make_room(self, tenant: str, reservation: Reservation, memory: Mapping[str, int], least: bool = False) -> None:
        """Reserve as much for a model, in place of what was reserved for it; pages others out for that, if that is enabled.

        `least`: it takes more than that, unknown how much. Raises OverBudget, after `PATIENCE` if there may be room soon.
        Without a budget nothing is reserved.
        """
        await self._in_turn(tenant, partial(self._reserve, tenant, reservation, memory, least))

    async def _in_turn(self, tenant: str, attempt: Callable[[], Awaitable[None]]) -> None:
        """Attempt what needs room, with the tenant's lock, until there is some. Raises OverBudget after `PATIENCE`."""
        if tenant not in self._pages:
            raise Unavailable("its tenant has left this device")
        turn, lock, loaded = self._pages[tenant].turn, self.locks[tenant], time.monotonic() + PATIENCE
        while True:
            async with turn:
                until = time.monotonic() + PATIENCE
                while True:
                    try:
                        async with lock:
                            return await attempt()
                    except BeingLoaded:  # The load needs its turn.
                        if time.monotonic() >= loaded:
                            raise
                        break
                    except NoRoomYet:
                        if time.monotonic() >= until:
                            raise
                    await asyncio.sleep(RETRY)
            await asyncio.sleep(RETRY)

    def came(self, tenant: str, models: Iterable[ModelKey]) -> None:
        """These models were loaded now."""
        self._pages[tenant].since.update(dict.fromkeys(models, time.monotonic_ns()))

    def refuse_more(self, tenant: str, model: ModelKey, memory: Mapping[str, int]) -> str:
        """Why a model may not take as much more for another partition; "" if it may. Any thread, with its lock held."""
        config, claims, claim = self._tenants[tenant], self._claims(tenant), Claim(label(model), memory)
        fits = config.device_memory is None or missing(config.device_memory, claims, claim) <= 0
        return "" if fits else refusal(config, claims, claim)

    async def free(self, tenant: str, engines: Iterable[Engine]) -> None:
        """Free these engines now, as far as nothing uses them, if the tenant has a budget: it counts them no more."""
        if self._tenants[tenant].device_memory is not None:
            for engine in engines:
                await asyncio.get_running_loop().run_in_executor(self._threads, self._free_engine, engine)

    async def bring_back(self, tenant: str, names: Iterable[str]) -> None:
        """Bring back these models, as far as they are paged out; failures are left to what needs them."""
        for name in names:
            loaded = self._served.of(tenant).get(name)
            for served in loaded.served if loaded else ():
                if isinstance(self._workers[tenant].executors.get(served.key), PagedExecutor):
                    with suppress(Unavailable):
                        await asyncio.wrap_future(self.request(tenant, served.key))

    def request(self, tenant: str, model: ModelKey) -> "Future[None]":
        """Ask for a model that is paged out; the future is done when it is back. Any thread; never blocks."""
        with self._requesting:
            key = tenant, model
            if (future := self._requested.get(key)) is None:
                future = self._requested[key] = Future()
                future.set_running_or_notify_cancel()
                assert self._loop
                self._loop.call_soon_threadsafe(self._begin, tenant, model, future)
            return future

    def _begin(self, tenant: str, model: ModelKey, future: "Future[None]") -> None:
        task = asyncio.get_running_loop().create_task(self._bring_back(tenant, model, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_back(self, tenant: str, model: ModelKey, future: "Future[None]") -> None:
        """Page a model in, and complete the future. Errors are for the requests that wait."""
        error: Exception | None = None
        try:
            await self._in_turn(tenant, partial(self._page_in, tenant, model))
        except Exception as problem:
            if not isinstance(problem, RequestError | EngineError | PartitionError):
                log.exception("unexpected error while paging in %s of %s", model, tenant)
            name = label(model)
            log.warning(
                "model %s of %s is paged out and was not brought back: %s", name, tenant, problem, extra={"caller": tenant}
            )
            error = Unavailable(f"model {name} is paged out and could not be brought back: {problem}")
        with self._requesting:
            del self._requested[tenant, model]
        future.set_exception(error) if error else future.set_result(None)

    async def _page_in(self, tenant: str, model: ModelKey) -> None:
        """With the tenant's lock. Raises Unavailable, OverBudget, EngineError."""
        began = time.monotonic()
        if self._lifecycle.state in ("closed", "lost") or tenant not in self._workers:
            raise Unavailable("the server is stopping")
        worker = self._workers[tenant]
        stand_in = worker.executors.get(model)
        if stand_in is None:
            raise Unavailable("it was unloaded or replaced")
        if not isinstance(stand_in, PagedExecutor):  # It came back meanwhile.
            return
        with self.reserving(tenant, label(model)) as reservation:
            await self._reserve(tenant, reservation, stand_in.taken)
            with self._loading(tenant, model.partition("/")[0]):
                executor = await self._bind(stand_in.source, worker)
                try:
                    stand_in.taken = taken_more([executor], shared_in(worker))
                    await self._reserve(tenant, reservation, stand_in.taken)
                except BaseException:
                    await self._close(executor, held=True)
                    raise
                self._put(tenant, model, executor, stand_in)
                self._model_loader.let_go([executor.engine])
                reservation.end()
        self._placements.of(tenant).follow()
        pages = self._pages[tenant]
        pages.since[model] = time.monotonic_ns()
        pages.ins += 1
        pages.in_seconds += time.monotonic() - began
        took = (time.monotonic() - began) * 1000
        log.info("paged in for %s: %s, in %.0f ms", tenant, label(model), took, extra={"caller": tenant})

    def _put(self, tenant: str, model: ModelKey, executor: Executor, stand_in: PagedExecutor) -> None:
        """Run the model's tickets by this executor from now on."""
        executors = self._workers[tenant].executors
        stand_in.resident = executor
        executors.update({key: executor for key, each in executors.items() if each is stand_in})
        for loaded in self._served.of(tenant).values():
            if model in loaded.engines:
                loaded.engines[model] = executor.engine
        self._frontends[tenant].http_side.page_in(model)

    async def _reserve(self, tenant: str, reservation: Reservation, memory: Mapping[str, int], least: bool = False) -> None:
        """As `make_room`, with the tenant's lock."""
        if self._tenants[tenant].device_memory is not None:
            reservation.end()
            claim = reservation.claim._replace(memory=memory, least=least)
            await self._make_room(tenant, claim)
            reservation.claim = claim

    async def _make_room(self, tenant: str, needed: Claim) -> None:
        """Have models not ready for a move, then page out models, until this one fits.

        Raises OverBudget; NoRoomYet if others that have requests would do, BeingLoaded if what a load has reserved would.
        """
        config, busy = self._tenants[tenant], set[ModelKey]()
        while (over := missing(config.device_memory or 0, claims := self._claims(tenant), needed)) > 0:
            if await self._placements.of(tenant).ladder.give_way(over):
                continue
            residents = self._residents(tenant) if config.paging else dict[ModelKey, int]()
            if choose([Resident(model, nbytes, 0) for model, nbytes in residents.items()], over) is None:
                reserved = sum(each.claim.nbytes for each in self._pages[tenant].reservations) if config.paging else 0
                fits = over <= sum(residents.values()) + reserved
                raise (BeingLoaded if fits else OverBudget)(refusal(config, claims, needed))
            sources = {model: self.source(tenant, model) for model in residents}  # One may be unloaded meanwhile.
            used = await self._last_uses(tenant, residents)
            idle = [Resident(model, nbytes, used[model]) for model, nbytes in residents.items() if model not in busy]
            chosen = choose(idle, over)
            for each in chosen or ():
                if not await self.page_out(tenant, each.model, sources[each.model]):
                    busy.add(each.model)
                    break
            if chosen is None:
                raise NoRoomYet(f"{refusal(config, claims, needed)}; the models that could be paged out have requests")

    async def _last_uses(self, tenant: str, residents: Collection[ModelKey]) -> dict[ModelKey, int]:
        """When each of these was last used, or came."""
        pages = self._pages[tenant]
        pages.since = {model: pages.since.get(model, 0) for model in residents}
        used = await self._frontends[tenant].http_side.last_uses()
        return {model: max(since, used.get(model, 0)) for model, since in pages.since.items()}

    async def page_out(self, tenant: str, model: ModelKey, source: Source) -> bool:
        """Page a model out, unless it has requests; whether it was. With the tenant's lock."""
        began, clients, worker = time.monotonic(), self._frontends[tenant].http_side, self._workers[tenant]
        if not await clients.page_out(model):
            return False
        executor = worker.executors[model]
        memory = taken_more([executor], shared_in(worker, without=executor))
        stand_in = PagedExecutor(executor.engine, source, memory, partial(self.request, tenant, model))
        if await asyncio.to_thread(worker.exchange, model, stand_in) is None:  # A request came.
            clients.page_in(model)
            return False
        # Nothing is in flight there: the model has no request.
        await asyncio.to_thread(close_all, self._placements.of(tenant).leave([model]))
        await self._close(executor)
        pages = self._pages[tenant]
        pages.outs += 1
        pages.out_seconds += time.monotonic() - began
        freed = sized(sum(stand_in.taken.values()))
        log.info("paged out for %s: %s, which frees %s", tenant, label(model), freed, extra={"caller": tenant})
        return True

    async def _bind(self, source: Source, worker: Worker) -> Executor:
        """Read a model and bind it to the worker's partition. Raises ModelRefused. Its engine is held."""
        # CPU executors inherit the scheduling priority of the thread that binds them.
        threads = self._threads if worker.partition.host_cores is None else None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, self._model_loader.bring_back, source, worker.partition, worker.pace)

    async def _close(self, executor: Executor, held: bool = False) -> None:
        """Close an executor that no worker has, and free its engine if nothing else uses it. `held`: it was just bound."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._free, executor, held)

    def _free(self, executor: Executor, held: bool) -> None:
        """Blocks."""
        close_all([executor])
        if held:
            self._model_loader.let_go([executor.engine])
        self._free_engine(executor.engine)

    def _free_engine(self, engine: Engine) -> None:
        """Blocks."""
        self._model_loader.free(engine, bound_executors(self._workers))

    def _claims(self, tenant: str) -> list[Claim]:
        """What the tenant's models have, and what is reserved for models that are being loaded."""
        models = model_memory(self._workers[tenant], self._placements.of(tenant).adds)
        held = [Claim(f"{each.name} {each.version}", each.memory) for each in models if not each.paged]
        return held + [each.claim for each in self._pages[tenant].reservations]

    def _residents(self, tenant: str) -> dict[ModelKey, int]:
        """The models that could be paged out, with the bytes that this frees, in the order in which they were loaded.

        Ensembles stay, and their steps, whose engines they use.
        """
        models, kept = self._served.of(tenant), self._pages[tenant].kept
        steps = {step for loaded in models.values() if loaded.served for step in loaded.steps}
        executors, found = self._workers[tenant].executors, {}
        for loaded in models.values():
            if not (loaded.steps or loaded.name in steps or kept[loaded.name]):
                for served in loaded.served:
                    executor = executors.get(served.key)
                    if executor is not None and not isinstance(executor, PagedExecutor):
                        memory = added([taken(executor), self._placements.of(tenant).adds(served.key)])
                        found[served.key] = sum(memory.values())
        return found

    def source(self, tenant: str, model: ModelKey) -> Source:
        """What a version was loaded from."""
        return next(loaded.sources[model] for loaded in self._served.of(tenant).values() if model in loaded.sources)


class Resident(NamedTuple):
    """A model that could be paged out: the bytes that this frees, and when it was last used, in any unit."""

    model: ModelKey
    nbytes: int
    used: int


def choose(residents: Iterable[Resident], missing: int) -> list[Resident] | None:
    """The models to page out to free so many bytes, the least recently used first; None if all of them are not enough.

    Models that were used at the same time go in the order given. No model is among them without need: if a large one makes an
    earlier, smaller one superfluous, that stays.
    """
    chosen: list[Resident] = []
    freed = 0
    for each in sorted(residents, key=lambda resident: resident.used):
        if freed >= missing:
            break
        if each.nbytes > 0:
            chosen.append(each)
            freed += each.nbytes
    if freed < missing:
        return None
    for each in reversed(chosen[:]):  # Of those that need not go, the most recently used stay.
        if freed - each.nbytes >= missing:
            chosen.remove(each)
            freed -= each.nbytes
    return chosen
