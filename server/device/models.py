"""What is asked of the models of this process's tenants: load or unload one, follow the repository, change whole lists."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ..config.schema import ModelOptions
from ..config.tables import near_to
from ..config.tenant import TenantConfig
from ..control.descriptions import Execution, TenantMemory
from ..errors import BadRequest, NotFound, Unavailable
from ..tenants.catalog import UNLOADED, IndexEntry
from ..tenants.frontend import Frontend
from .loaded_model import LoadedModel, versions
from .model_loader import NO_OPTIONS, ModelLoader
from .tenant_models import TenantModels

log = logging.getLogger("greenlane.runtime")

_NO_STEP = "its step {!r} is not a model of this tenant's any more"
_GOES_ON = "served as it was, since its files have changed and cannot be"
GONE = "no longer in the repository"


class _Staged:
    """What was loaded for one tenant, by model; no request can name it yet. `kept` keeps steps of its ensembles."""

    def __init__(self) -> None:
        self.models: dict[str, LoadedModel] = {}
        self.kept = ExitStack()


class Models:
    """See `server.control.device_runtime.Models`. Every method belongs to the event loop.

    A change of lists takes `prepare`, then `use` or `discard`; one change at a time. `lists` are the models that tenants may
    call, of those for which anything changes, and `options` the tables [models.NAME] of models that are to be loaded again. No
    model of these tenants is loaded or unloaded on request meanwhile.
    """

    def __init__(self, models: TenantModels, frontends: Mapping[str, Frontend], model_loader: ModelLoader) -> None:
        self._models = models
        self._frontends = frontends
        self._model_loader = model_loader
        self._staged: dict[str, _Staged] = {}
        self.options: Mapping[str, ModelOptions] = NO_OPTIONS
        """Those that were prepared, and are not used yet."""

    async def executions(self) -> list[Execution]:
        return self._models.executions()

    async def memory(self) -> list[TenantMemory]:
        return self._models.pager.memory()

    async def load(self, tenant: str, name: str, override: str | None = None) -> None:
        """Load or reload a model for one tenant, all versions or none; other tenants are not affected.

        An ensemble's missing steps are loaded before it, and ensembles that use the model are rebuilt. The old versions serve
        until the new ones are ready, and stay if the load fails. Raises NotFound for a model that the tenant may not call,
        BadRequest with the reason if a version cannot be served. If cancelled while it waits for earlier changes nothing is
        loaded; later it is completed all the same.
        """
        self._check_may_call(tenant, name)
        await self._models.in_turn(tenant, partial(self._load, tenant, name, override))

    async def unload(self, tenant: str, name: str) -> None:
        """Stop serving a model to one tenant: accepted requests are finished, new ones get 503.

        The same holds for ensembles that use it, until it is loaded again. Raises NotFound for a model that the tenant may not
        call. Cancelling is as for `load`.
        """
        self._check_may_call(tenant, name)
        await self._models.in_turn(tenant, partial(self._unload, tenant, name))

    async def refresh(self, tenant: str, name: str) -> str:
        reasons: list[str] = []
        await self._models.in_turn(tenant, partial(self._refresh, tenant, name, reasons))
        return "".join(reasons)

    def set(self, lists: Mapping[str, Sequence[str]]) -> None:
        """These tenants have these lists; before their models are loaded."""
        tenants = self._models.tenants
        tenants |= {name: tenants[name].with_models(models) for name, models in lists.items()}

    async def prepare(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = NO_OPTIONS) -> list[str]:
        """Load what each tenant may call by its new list and not by its old one, and what has other options and is not
        unloaded. Nothing of it is served yet.

        Returns why models cannot be served, each with its tenant; `discard` it then. Raises Unavailable while the server stops.
        """
        self._staged |= {tenant: _Staged() for tenant in lists}
        self.options = options
        problems: list[str] = []
        await asyncio.gather(
            *(
                self._models.in_turn(tenant, partial(self._prepare, tenant, models, options, problems))
                for tenant, models in lists.items()
            )
        )
        return problems

    async def use(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = NO_OPTIONS) -> None:
        """Serve the models of these lists, with these options: those that were prepared, and no others than before. Returns
        when that is so.

        Models that are in no list any more, and those that were loaded again, are freed when their requests have ended. What is
        new and was not prepared, as this process was started later, is loaded as at a start.
        """
        self._model_loader.use_options(options)
        self.options = NO_OPTIONS
        await asyncio.gather(
            *(self._models.in_turn(tenant, partial(self._use, tenant, models)) for tenant, models in lists.items())
        )

    async def discard(self) -> None:
        """Free what was prepared. Does nothing if nothing was."""
        self.options = NO_OPTIONS
        await asyncio.gather(*(self._models.in_turn(tenant, partial(self._discard, tenant)) for tenant in list(self._staged)))

    def _again(self, tenant: str, options: Mapping[str, ModelOptions]) -> list[LoadedModel]:
        """The tenant's models that are to be loaded again for these options, and the ensembles that are served with them."""
        known = self._models.served.of(tenant)
        changed = [known[name] for name in options if name in known]
        changed = [each for each in changed if [problem.reason for problem in each.problems] != [UNLOADED]]
        names = [each.name for each in changed]
        return changed + [each for each in self._models.served.ensembles(tenant, names) if each.served and each not in changed]

    def _added(self, before: TenantConfig, after: TenantConfig, there: Sequence[str]) -> list[str]:
        """What the tenant may call only now, or names in place of "*" and never had, as it was not in the repository."""
        names = set(after.models) - set(before.models) - self._models.served.of(after.name).keys()
        return [name for name in after.may_call_of(there) if name in names or not before.may_call(name)]

    async def _prepare(
        self, tenant: str, models: Sequence[str], options: Mapping[str, ModelOptions], problems: list[str]
    ) -> None:
        staged = self._staged[tenant]
        before = self._models.tenants[tenant]
        after = before.with_models(models)
        there = await asyncio.to_thread(self._model_loader.names)
        added = self._added(before, after, there)
        again = {each.name: each.override for each in self._again(tenant, options) if after.may_call(each.name)}
        stays = {name: loaded for name, loaded in self._models.served.of(tenant).items() if after.may_call(name)}
        tried: dict[str, LoadedModel] = {}
        for name in await asyncio.to_thread(self._model_loader.in_order, [*again, *added]):
            where = f"tenants.{tenant}.models: failed to load {name!r}"
            if name in again:
                where += " with its new options" if name in options else " with the new options of its steps"
            if name not in there:
                problems.append(f"{where}: not in the repository")
                continue
            loaded = tried[name] = await self._models.stage(tenant, name, {**stays, **tried}, again.get(name), options)
            if loaded.served:
                staged.models[name] = loaded
                staged.kept.enter_context(self._models.pager.keeping(tenant, loaded.steps))
            else:
                problems.append(f"{where}: {loaded.why() or 'there is nothing in it to serve'}")

    async def _use(self, tenant: str, models: Sequence[str]) -> None:
        staged, served = self._staged.pop(tenant, _Staged()), self._models.served
        before = self._models.tenants[tenant]
        self.set({tenant: models})
        after = self._models.tenants[tenant]
        there = await asyncio.to_thread(self._model_loader.names)
        added = self._added(before, after, there)
        for loaded in staged.models.values():
            await self._models.publish(tenant, loaded)
        staged.kept.close()
        gone = {name: loaded for name, loaded in served.of(tenant).items() if not after.may_call(name)}
        for name in sorted(gone, key=lambda name: not gone[name].steps):  # Ensembles first, which use the others.
            for ensemble in served.ensembles(tenant, [name]):
                if ensemble.name not in gone and ensemble.served:
                    log.warning("unavailable for %s: %s, as %s", tenant, ensemble.name, _NO_STEP.format(name))
                    await self._models.publish(tenant, ensemble.stopped(_NO_STEP.format(name)))
            await self._models.forget(tenant, name)
        late = [name for name in added if name not in staged.models]
        for name in await asyncio.to_thread(self._model_loader.in_order, late):
            await self._models.load(tenant, name)
        changed = list(dict.fromkeys([*added, *staged.models]))
        await self._models.renew_ensembles(tenant, changed, changed)
        if again := [name for name in staged.models if name not in added]:
            log.info("loaded again for %s: %s", tenant, again)
        if tuple(models) != tuple(before.models):
            shown = added or "none", list(gone) or "none"
            log.info("tenant %s may call %s; added: %s; taken away: %s", tenant, list(models), *shown)

    async def _discard(self, tenant: str) -> None:
        staged = self._staged.pop(tenant, _Staged())
        for loaded in reversed(staged.models.values()):
            await self._models.unstage(tenant, loaded)
        staged.kept.close()

    def _check_may_call(self, tenant: str, name: str) -> None:
        if not self._models.tenants[tenant].may_call(name):
            raise NotFound(f"Request for unknown model: {name!r} is not found")

    async def _load(self, tenant: str, name: str, override: str | None) -> None:
        there = await asyncio.to_thread(self._model_loader.names)
        if name not in there:
            near = near_to(name, filter(self._models.tenants[tenant].may_call, there))
            raise BadRequest(f"failed to load {name!r}: not in the repository{f'; did you mean {near!r}?' if near else ''}")
        steps = await asyncio.to_thread(self._model_loader.steps, name, override)
        allowed = [step for step in steps if step in there and self._models.tenants[tenant].may_call(step)]
        missing = [step for step in allowed if not self._models.served.serves(tenant, step)]
        changed = {step for step in missing if (await self._load_alone(tenant, step, None)).served}
        loaded = await self._load_alone(tenant, name, override)
        await self._models.renew_ensembles(tenant, {*changed, name} if loaded.served else changed, [name])
        if not loaded.served:
            raise BadRequest(f"failed to load {name!r}: {loaded.why()}")
        log.info("loaded for %s: %s", tenant, versions(loaded), extra={"caller": tenant})

    async def _load_alone(self, tenant: str, name: str, override: str | None) -> LoadedModel:
        kept = self._models.served.serves(tenant, name)
        return await self._models.load(tenant, name, override, whole=True, kept=kept)

    async def _unload(self, tenant: str, name: str) -> None:
        if name in self._models.served.of(tenant):
            for ensemble in self._models.served.ensembles(tenant, [name]):
                await self._models.publish(tenant, ensemble.stopped(f"its step {name!r} was unloaded"))
                text = "unavailable for %s: %s, as its step %s is unloaded"
                log.info(text, tenant, ensemble.name, name, extra={"caller": tenant})
            await self._models.publish(tenant, LoadedModel(name, [], [IndexEntry(name, "", "UNAVAILABLE", UNLOADED)], {}))
            log.info("unloaded for %s: %s", tenant, name, extra={"caller": tenant})

    async def _refresh(self, tenant: str, name: str, reasons: list[str]) -> None:
        """Adds the reason to `reasons` if it cannot be served."""
        if not self._models.tenants[tenant].may_call(name):
            return
        known = self._models.served.of(tenant).get(name)
        if known and [problem.reason for problem in known.problems] == [UNLOADED]:
            log.info("not loaded for %s, who has unloaded it: %s", tenant, name)
            return
        try:
            there = await asyncio.to_thread(self._model_loader.has, name)
        except OSError as error:
            raise Unavailable(f"the model repository cannot be read: {error.strerror}") from error
        if there:
            await self._load_again(tenant, name, known, reasons)
        elif known:
            await self._take_away(tenant, name)

    async def _load_again(self, tenant: str, name: str, before: LoadedModel | None, reasons: list[str]) -> None:
        """Load it beside what is served of it, which stays if that fails: then the index has the reason as well."""
        kept = bool(before and before.served)
        loaded = await self._models.load(tenant, name, before.override if before else None, whole=kept, kept=kept)
        if loaded.served:
            await self._models.renew_ensembles(tenant, [name], [name])
            log.info("loaded for %s, as its files have changed: %s", tenant, versions(loaded))
        elif before and before.served:
            await self._frontends[tenant].http_side.publish(name, before.served, list(_beside(before, loaded.problems)))
        if loaded.problems:
            reasons.append(loaded.why())

    async def _take_away(self, tenant: str, name: str) -> None:
        """Stop serving a model whose directory has gone, and ensembles that use it."""
        log.info("taken away from %s, as it is %s: %s", tenant, GONE, name)
        for ensemble in self._models.served.ensembles(tenant, [name]):
            await self._models.publish(tenant, ensemble.stopped(f"its step {name!r} is {GONE}"))
        if name in self._models.tenants[tenant].models:  # By its own name, so the index keeps it.
            await self._models.publish(tenant, LoadedModel(name, [], [IndexEntry(name, "", "UNAVAILABLE", GONE)], {}))
        else:
            await self._models.forget(tenant, name)


def _beside(before: LoadedModel, problems: Iterable[IndexEntry]) -> Iterator[IndexEntry]:
    """These problems, where a version that is served goes on as it was loaded before with the reason for that."""
    served = [each.version for each in before.served]
    for problem in problems:
        versions = [problem.version] if problem.version in served else [] if problem.version else served
        yield from (replace(problem, version=each, reason=f"{_GOES_ON}: {problem.reason}") for each in versions)
        if not versions:
            yield problem
