"""Reads, binds, publishes and frees the models of tenants; loads all of them at the start."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from engines.thread_priority import lower_priority
from partitions import DeviceLost

from ..config.schema import ModelOptions
from ..config.tenant import TenantConfig
from ..control.descriptions import AS_CONFIGURED, AtStart, Execution, Loading
from ..errors import Unavailable
from ..link.messages import ModelKey
from ..tenants.catalog import IndexEntry
from ..tenants.frontend import Frontend, Lifecycle
from ..workers.placement import close_all
from ..workers.worker import Worker
from ..workers.worker_control import WorkerControl
from .ahead import NOTHING_AHEAD, Ahead, Wanted, making_ahead
from .budget import shared_in, taken_more
from .loaded_model import LoadedModel, LoadedModels, PreparedModel, expected, learnt_shapes
from .model_loader import NO_OPTIONS, ModelLoader
from .pager import OverBudget, Pager, Reservation
from .placements import Placements
from .tenant_locks import TenantLocks

log = logging.getLogger("greenlane.runtime")

_AGAIN = 1.0
"""Seconds after which a repository that cannot be read is tried again."""
OnLoading = Callable[[Loading], None]
"""Called when a model begins to be loaded, when what is done with it changes, and when that has ended."""


class TenantModels:
    """Changes the models of each tenant. Every method belongs to the event loop; blocking calls run on threads.

    A model is read under the tenant's `ordering` lock alone, since that takes minutes if it has to be built. It is bound to the
    partition and published under the tenant's `changing` lock as well, which repartitions also hold.
    """

    def __init__(
        self,
        tenants: Mapping[str, TenantConfig],
        strict_readiness: bool,
        frontends: Mapping[str, Frontend],
        model_loader: ModelLoader,
        workers: Mapping[str, Worker],
        worker_control: WorkerControl,
        locks: TenantLocks,
        lifecycle: Lifecycle,
        on_loading: OnLoading,
        placements: Placements,
    ) -> None:
        self.tenants = dict(tenants)
        self._frontends = frontends
        self._model_loader = model_loader
        self._workers = workers
        self._worker_control = worker_control
        self._locks = locks
        self._lifecycle = lifecycle
        self._on_loading = on_loading
        self._placements = placements
        self.served = LoadedModels(tenants, strict_readiness)
        self.pager = Pager(
            self.tenants, self.served, frontends, model_loader, workers, locks.paging, lifecycle, self._loads, placements
        )
        placements.means.refuse = self.pager.refuse_more
        self.ordering = {name: asyncio.Lock() for name in tenants}
        """Held from the beginning to the end of a load or unload: one at a time for each tenant."""
        self._loaders = ThreadPoolExecutor(max(1, len(tenants)), "load", lower_priority)
        self._changes: set[asyncio.Task[None]] = set()
        self._being_loaded: dict[str, list[str]] = {}
        """By tenant: one that is loaded on request, and one that is paged in."""
        self._known: dict[str, int] = {}
        """How many models a tenant may call, as far as was looked."""
        self._loading: asyncio.Task[None] | None = None

    def start(self, at_start: AtStart) -> None:
        """Start loading all models of all tenants; each tenant must have its partition."""
        self.pager.open()
        self._loading = asyncio.create_task(self._load_all(at_start, tuple(self.tenants.values())))

    def add(self, tenant: TenantConfig) -> None:
        """A tenant without models has come."""
        self.tenants[tenant.name] = tenant
        self.served.add(tenant.name)
        self.ordering[tenant.name] = asyncio.Lock()
        self.pager.add(tenant.name)

    def remove(self, tenant: str) -> None:
        """This tenant has gone; none of its models is being changed."""
        self.tenants.pop(tenant, None)
        self.served.remove(tenant)
        self._known.pop(tenant, None)
        self.ordering.pop(tenant, None)
        self.pager.remove(tenant)

    def close(self) -> None:
        """Shut down the threads that read models."""
        self._loaders.shutdown(wait=False)
        self.pager.close()

    async def loaded(self) -> None:
        """Wait until every configured model was tried."""
        if self._loading:
            await self._loading

    async def stage(
        self,
        tenant: str,
        name: str,
        among: Mapping[str, LoadedModel],
        override: str | None = None,
        options: Mapping[str, ModelOptions] = NO_OPTIONS,
    ) -> LoadedModel:
        """Read and bind a model, all versions or none, and publish nothing: `publish` does that, or `unstage` frees it.

        Until then its executors are in the tenant's worker, so a repartition moves them too. `among` are the models of which an
        ensemble is made; `override` and `options` are as for `ModelLoader.prepare`. Call it within `in_turn`.
        """
        with self._loads(tenant, name), self.pager.reserving(tenant, name) as reservation:
            prepared = await self._read_model(tenant, name, override, reservation, among, options)
            async with self._locks.changing[tenant]:
                loaded = await self._bind(tenant, prepared, reservation, whole=True)
                self._workers[tenant].executors.update(loaded.executors)
                self._model_loader.let_go(loaded.engines.values())
                self.pager.came(tenant, loaded.executors)
                reservation.end()
        return replace(loaded, executors={})

    async def publish(self, tenant: str, loaded: LoadedModel) -> None:
        """Serve a model that was staged, or that is `LoadedModel.stopped`. Call it within `in_turn`."""
        async with self._locks.changing[tenant]:
            await self._put(tenant, loaded)

    async def unstage(self, tenant: str, loaded: LoadedModel) -> None:
        """Free a model that was staged. Call it within `in_turn`."""
        self._frontends[tenant].http_side.withdraw(loaded.name)
        async with self._locks.changing[tenant]:
            await self._free(tenant, [served.key for served in loaded.served])

    async def forget(self, tenant: str, name: str) -> None:
        """Stop serving a model, once its requests have ended, and know nothing of it any more. Call it within `in_turn`."""
        async with self._locks.changing[tenant]:
            before = self.served.forget(tenant, name)
            settled = await self._frontends[tenant].http_side.publish(name, [], [])
            await self._left(tenant, before, settled)
        log.info("no model of %s any more: %s", tenant, name, extra={"caller": tenant})

    def executions(self) -> list[Execution]:
        """As `LoadedModels.executions`, on the current workers."""
        return self.served.executions(self._workers)

    async def in_turn(self, tenant: str, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a change after all earlier ones of the tenant; once started it is completed even if the caller is cancelled.

        Raises Unavailable if the server was closed meanwhile.
        """
        ordering = self.ordering[tenant]
        await ordering.acquire()
        if self._lifecycle.state == "closed":
            ordering.release()
            raise Unavailable("the server is stopping")
        changing = asyncio.ensure_future(change())
        self._changes.add(changing)
        changing.add_done_callback(self._changes.discard)
        changing.add_done_callback(lambda _: ordering.release())
        await asyncio.shield(changing)

    async def load(
        self,
        tenant: str,
        name: str,
        override: str | None = None,
        whole: bool = False,
        kept: bool = False,
        options: Mapping[str, ModelOptions] = NO_OPTIONS,
    ) -> LoadedModel:
        """Read and bind a model, and publish it; one that is to be `kept` stays if this fails. `whole` is as in `_bind`.

        Call it within `in_turn`.
        """
        with self._loads(tenant, name), self.pager.reserving(tenant, name) as reservation:
            self._frontends[tenant].http_side.announce(name)
            prepared = await self._read_model(tenant, name, override, reservation, self.served.of(tenant), options)
            async with self._locks.changing[tenant]:
                loaded = await self._bind(tenant, prepared, reservation, whole, kept)
                reservation.end()  # What was bound is in the worker from now on.
                try:
                    if loaded.served or not kept:
                        await self._put(tenant, loaded)
                finally:
                    self._model_loader.let_go(loaded.engines.values())
        return loaded

    async def renew_ensembles(self, tenant: str, changed: Collection[str], loaded: Collection[str]) -> None:
        """Rebuild the ensembles that use one of these models, except those that were just `loaded`. Call it within `in_turn`.

        An ensemble that cannot be rebuilt becomes unavailable with the reason, as in Triton.
        """
        for ensemble in self.served.ensembles(tenant, changed):
            if ensemble.name not in loaded:
                await self.load(tenant, ensemble.name, ensemble.override, whole=True)

    async def _load_all(self, at_start: AtStart, tenants: Sequence[TenantConfig]) -> None:
        """Load all models of these tenants in parallel; the server is ready when the last model was tried.

        A tenant that comes meanwhile is not one of them: its models are loaded once it has its partition.
        """
        if at_start.again:
            await self._until_readable()
        known = await asyncio.to_thread(self._model_loader.names) if self._model_loader.making else []
        wanted = self._wanted(known, at_start, tenants)
        async with making_ahead(self._model_loader, wanted) as ahead:
            await asyncio.gather(*(self.load_tenant(each.name, at_start=at_start, ahead=ahead) for each in tenants))
        if self._lifecycle.state == "starting":
            self._lifecycle.set_state(self.served.state())

    async def _until_readable(self) -> None:
        """Wait until the repository can be read: its disk may come back, and until then it is not known what there is."""
        logged = ""
        while self._lifecycle.state == "starting" and (why := await asyncio.to_thread(self._model_loader.unreadable)):
            if why != logged:
                log.error("the model repository cannot be read, which is tried again every %g s: %s", _AGAIN, why)
            logged = why
            await asyncio.sleep(_AGAIN)

    def _wanted(
        self, known: Collection[str], at_start: AtStart, tenants: Iterable[TenantConfig]
    ) -> dict[tuple[str, str], Wanted]:
        """What is loaded for these tenants at the start, of a repository with these models."""
        return {
            (tenant.name, name): Wanted(
                at_start.overrides.get((tenant.name, name)), self._workers[tenant.name].partition, tenant.device_memory
            )
            for tenant in tenants
            for name in tenant.may_call_of(known)
            if name in known and (tenant.name, name) not in at_start.left_out
        }

    async def load_tenant(
        self,
        name: str,
        options: Mapping[str, ModelOptions] = NO_OPTIONS,
        at_start: AtStart = AS_CONFIGURED,
        ahead: Ahead = NOTHING_AHEAD,
    ) -> None:
        """Load all models that a tenant may call, with these options in place of the current ones. Ends early if the server
        does. Those that were made `ahead` come first, unless another process has left an order.
        """
        tenant = self.tenants[name]
        known = await asyncio.to_thread(self._model_loader.names)
        names = tenant.may_call_of(known)
        for name in names:
            self._frontends[tenant.name].http_side.announce(name)
        self._frontends[tenant.name].http_side.listed()
        self._known[tenant.name] = len(names)
        self._say(tenant.name)
        overrides, left_out, ranks, _ = at_start
        rank = ranks.get(tenant.name, {})
        names.sort(key=lambda model: rank.get(model, 0))
        left = await asyncio.to_thread(self._model_loader.in_order, names)
        while left:
            next_ones = dict(islice(left.items(), 1)) if rank else left
            while (found := ahead.first(tenant.name, next_ones)) is None:
                self._say(tenant.name, "building or compiling", next(iter(next_ones)))
                await ahead.wait(tenant.name, next_ones)
            name = found
            if self._lifecycle.state not in ("starting", "serving", "incomplete"):
                return
            del left[name]
            async with self.ordering[tenant.name]:
                if why := left_out.get((tenant.name, name)):
                    problem = IndexEntry(name, "", "UNAVAILABLE", why)
                    await self._put(tenant.name, LoadedModel(name, [], [problem], {}))
                    continue
                override = overrides.get((tenant.name, name))
                try:
                    await self.load(tenant.name, name, override, whole=override is not None, options=options)
                except (Unavailable, DeviceLost):
                    raise
                except Exception as error:  # As of one that no message can say, for which no other model waits.
                    log.exception("model %s of %s could not be published", name, tenant.name, extra={"caller": tenant.name})
                    problem = IndexEntry(name, "", "UNAVAILABLE", str(error))
                    await self._put(tenant.name, LoadedModel(name, [], [problem], {}))
            ahead.forget(tenant.name, name)
        if not any(self.served.serves(tenant.name, name) for name in self.served.of(tenant.name)):
            log.warning(
                "tenant %s has no loaded model: %s", tenant.name, "every model failed" if names else "it may call no model"
            )

    @contextmanager
    def _loads(self, tenant: str, name: str) -> Iterator[None]:
        """Within the block this model is being loaded: what ends the process then may be the model."""
        being_loaded = self._being_loaded.setdefault(tenant, [])
        being_loaded.append(name)
        self._say(tenant)
        try:
            yield
        finally:
            being_loaded.remove(name)
            self._say(tenant)

    def _say(self, tenant: str, doing: str = "reading or building", apart: str = "") -> None:
        """Report which of a tenant's models is being loaded, and what is done with it; if it is none, that another process does
        this for the model `apart`.
        """
        name = next(iter(self._being_loaded.get(tenant, [])[-1:]), "")
        models = self.served.of(tenant).values()
        ready = len([each for each in models if each.served])
        failed = len([each for each in models if each.problems and not each.served])
        known = self._known.get(tenant, len(models))
        self._on_loading(Loading(tenant, name or apart, doing, ready, failed, known, apart=bool(apart and not name)))

    async def _read_model(
        self,
        tenant: str,
        name: str,
        override: str | None,
        reservation: Reservation,
        among: Mapping[str, LoadedModel],
        options: Mapping[str, ModelOptions] = NO_OPTIONS,
    ) -> PreparedModel:
        """Read a model, which takes minutes if it has to be built: without a partition's lock, and on threads that are used for
        nothing else. One at a time for each tenant. Without room for its files in the tenant's budget it is not read.
        """
        loop = asyncio.get_running_loop()
        if self.tenants[tenant].device_memory is not None:
            least = await asyncio.to_thread(self._model_loader.file_bytes, name, override)
            try:
                await self.pager.make_room(tenant, reservation, {"file": least}, least=True)
            except OverBudget as error:
                return PreparedModel(LoadedModel(name, [], [_problem(name, error)], {}, override=override))
        steps = await asyncio.to_thread(self._model_loader.steps, name, override)
        with self.pager.keeping(tenant, steps):
            await self.pager.bring_back(tenant, steps)
            prepare = partial(self._model_loader.prepare, name, override, among, options, self._workers[tenant].pace)
            return await loop.run_in_executor(self._loaders, prepare)

    async def _bind(
        self, tenant: str, prepared: PreparedModel, reservation: Reservation, whole: bool = False, kept: bool = False
    ) -> LoadedModel:
        """Bind a model to the tenant's partition, and check that it fits the tenant's budget, and its requests its memory.

        `whole`, `kept` and what is to be done with the engines of the result are as in `ModelLoader.bind`.
        """
        try:
            await self.pager.make_room(tenant, reservation, expected(prepared))
        except OverBudget as error:
            refused = await asyncio.to_thread(self._model_loader.refuse, prepared, _problem(prepared.loaded.name, error), kept)
            await self.pager.free(tenant, [version.engine for version in prepared.versions])
            return refused
        partition = self._workers[tenant].partition
        self._say(tenant, "compiling or loading the kernels of" if partition.host_cores is None else "loading")
        # CPU executors inherit the scheduling priority of the thread that binds them.
        threads = self._loaders if partition.host_cores is None else None
        loop = asyncio.get_running_loop()
        served = self._lifecycle.state in ("serving", "incomplete")
        if (before := self.served.of(tenant).get(prepared.loaded.name)) is not None:
            executors = self._workers[tenant].executors
            prepared.learnt.extend(learnt_shapes(executors[key] for each in before.served if (key := each.key) in executors))
        bind = partial(self._model_loader.bind, prepared, partition, self.tenants[tenant], whole, kept, served)
        fitting = await loop.run_in_executor(threads, bind)
        try:
            more = taken_more(fitting.executors.values(), shared_in(self._workers[tenant]))
            await self.pager.make_room(tenant, reservation, more)
        except OverBudget as error:
            log.warning("model %s is unavailable: %s", fitting.name, error, extra={"caller": tenant})
            fitting = replace(fitting, problems=[*fitting.problems, _problem(fitting.name, error)])
        else:
            if not (whole and fitting.problems):
                why = (
                    await self._frontends[tenant].http_side.agree(fitting.name, fitting.served)
                    if whole and fitting.served
                    else ""
                )
                if not why:
                    return fitting
                fitting = replace(fitting, problems=[IndexEntry(fitting.name, "", "UNAVAILABLE", why)])
        discarded = await asyncio.to_thread(fitting.discard)
        self._model_loader.let_go(fitting.engines.values())
        await self.pager.free(tenant, fitting.engines.values())
        return discarded

    async def _put(self, tenant: str, loaded: LoadedModel) -> None:
        """Publish a model in place of the old one, which is closed when its last request has ended."""
        self._workers[tenant].executors.update(loaded.executors)
        self.pager.came(tenant, loaded.executors)
        before = self.served.put(tenant, loaded)
        settled = await self._frontends[tenant].http_side.publish(loaded.name, loaded.served, loaded.problems)
        await self._left(tenant, before, settled)

    async def _left(self, tenant: str, before: LoadedModel | None, settled: bool) -> None:
        """Close what was served before, and have all else follow the tenant's models, which have changed."""
        await self._free(tenant, [served.key for served in before.served] if before else [], settled)
        self._placements.of(tenant).follow()
        if self._lifecycle.state in ("serving", "incomplete") and self.served.state() != self._lifecycle.state:
            self._lifecycle.set_state(self.served.state())

    async def _free(self, tenant: str, keys: Sequence[ModelKey], settled: bool = True) -> None:
        """Close the executors of these models, and what was made of them. Not `settled`: requests for them may be running."""
        executors = self._workers[tenant].executors
        async with self._locks.paging[tenant]:  # One of them may be on its way back.
            left = [executors.pop(key) for key in keys]
        closing = [*self._placements.of(tenant).leave(keys), *left]
        if settled:
            await asyncio.to_thread(close_all, closing)
        elif left:  # Its HTTP process died: its requests may still be running.
            async with self._worker_control.stopped(tenant):
                await asyncio.to_thread(close_all, closing)
        self._workers[tenant].metering.forget(keys)
        await self.pager.free(tenant, [executor.engine for executor in left])


def _problem(name: str, error: OverBudget) -> IndexEntry:
    return IndexEntry(name, "", "UNAVAILABLE", str(error))
