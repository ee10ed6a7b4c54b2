"""Changes which models tenants may call while they are served: what is added is loaded before anything changes."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from .loaded_model import LoadedModel
from .model_loader import ModelLoader
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

    No model of these tenants is loaded or unloaded on request meanwhile.
    """

    def __init__(self, models: TenantModels, model_loader: ModelLoader) -> None:
        self._models = models
        self._model_loader = model_loader
        self._staged: dict[str, _Staged] = {}

    def __repr__(self) -> str:
        return f"<ModelLists of {self._models!r}, {len(self._staged)} changes on their way>"

    def set(self, lists: Mapping[str, Sequence[str]]) -> None:
        """These tenants have these lists; before their models are loaded."""
        tenants = self._models.tenants
        tenants |= {name: tenants[name].with_models(models) for name, models in lists.items()}

    async def prepare(self, lists: Mapping[str, Sequence[str]]) -> list[str]:
        """Load what each of these tenants may call by its new list and not by its old one. Nothing of it is served yet.

        Returns why models cannot be served, each with its tenant; `discard` it then. Raises Unavailable while the server stops.
        """
        self._staged |= {tenant: _Staged() for tenant in lists}
        problems: list[str] = []
        await asyncio.gather(
            *(
                self._models.in_turn(tenant, partial(self._prepare, tenant, models, problems))
                for tenant, models in lists.items()
            )
        )
        return problems

    async def use(self, lists: Mapping[str, Sequence[str]]) -> None:
        """Serve the models of these lists: those that were prepared, and no others than before. Returns when that is so.

        Models that are in no list any more are freed when their requests have ended. What is new and was not prepared, as this
        process was started later, is loaded as at a start.
        """
        await asyncio.gather(
            *(self._models.in_turn(tenant, partial(self._use, tenant, models)) for tenant, models in lists.items())
        )

    async def discard(self) -> None:
        """Free what was prepared. Does nothing if nothing was."""
        await asyncio.gather(*(self._models.in_turn(tenant, partial(self._discard, tenant)) for tenant in list(self._staged)))

    async def _prepare(self, tenant: str, models: Sequence[str], problems: list[str]) -> None:
        staged = self._staged[tenant]
        before = self._models.tenants[tenant]
        after = before.with_models(models)
        there = await asyncio.to_thread(self._model_loader.names)
        added = [name for name in after.may_call_of(there) if not before.may_call(name)]
        stays = {name: loaded for name, loaded in self._models.served.of(tenant).items() if after.may_call(name)}
        tried: dict[str, LoadedModel] = {}
        for name in await asyncio.to_thread(self._model_loader.in_order, added):
            if name not in there:
                problems.append(f"tenants.{tenant}.models: failed to load {name!r}: not in the repository")
                continue
            loaded = tried[name] = await self._models.stage(tenant, name, {**stays, **tried})
            if loaded.served:
                staged.models[name] = loaded
                staged.kept.enter_context(self._models.pager.keeping(tenant, loaded.steps))
            else:
                why = loaded.why() or "there is nothing in it to serve"
                problems.append(f"tenants.{tenant}.models: failed to load {name!r}: {why}")

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
        await self._models.renew_ensembles(tenant, added, added)
        log.info(
            "tenant %s may call %s; added: %s; taken away: %s", tenant, list(models), added or "none", list(gone) or "none"
        )

    async def _discard(self, tenant: str) -> None:
        staged = self._staged.pop(tenant, _Staged())
        for loaded in reversed(staged.models.values()):
            await self._models.unstage(tenant, loaded)
        staged.kept.close()
