"""Changes which models tenants may call, and their options, while they are served: what is added or is to be loaded again is
loaded before anything changes.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from ..config.schema import ModelOptions
from ..tenants.catalog import UNLOADED
from .loaded_model import LoadedModel
from .model_loader import NO_OPTIONS, ModelLoader
from .tenant_models import TenantModels

log = logging.getLogger("greenlane.runtime")

_NO_STEP = "its step {!r} is not a model of this tenant's any more"


class _Staged:
    """What was loaded for one tenant, by model; no request can name it yet. `kept` keeps steps of its ensembles."""

    def __init__(self) -> None:
        self.models: dict[str, LoadedModel] = {}
        self.kept = ExitStack()


class ModelLists:
    """Every method belongs to the event loop. A change takes `prepare`, then `use` or `discard`; one change at a time.

    `lists` are the models that tenants may call, of those for which anything changes, and `options` the tables [models.NAME] of
    models that are to be loaded again. No model of these tenants is loaded or unloaded on request meanwhile.
    """

    def __init__(self, models: TenantModels, model_loader: ModelLoader) -> None:
        self._models = models
        self._model_loader = model_loader
        self._staged: dict[str, _Staged] = {}
        self.options: Mapping[str, ModelOptions] = NO_OPTIONS
        """Those that were prepared, and are not used yet."""

    def __repr__(self) -> str:
        return f"<ModelLists of {self._models!r}, {len(self._staged)} changes on their way>"

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

    async def _prepare(
        self, tenant: str, models: Sequence[str], options: Mapping[str, ModelOptions], problems: list[str]
    ) -> None:
        staged = self._staged[tenant]
        before = self._models.tenants[tenant]
        after = before.with_models(models)
        there = await asyncio.to_thread(self._model_loader.names)
        added = [name for name in after.may_call_of(there) if not before.may_call(name)]
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
        there = await asyncio.to_thread(self._model_loader.names)
        added = [name for name in after.may_call_of(there) if not before.may_call(name)]
        late = [name for name in added if name not in staged.models]
        for name in await asyncio.to_thread(self._model_loader.in_order, late):
            await self._models.try_to_load(tenant, name)
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
