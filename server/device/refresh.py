"""Serves models as the repository has them now, after their files have changed."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from ..errors import Unavailable
from ..tenants.catalog import UNLOADED, IndexEntry
from ..tenants.frontend import Frontend
from .loaded_model import LoadedModel, versions
from .model_loader import ModelLoader
from .tenant_models import TenantModels

log = logging.getLogger("greenlane.runtime")

_GOES_ON = "served as it was, since its files have changed and cannot be"
GONE = "no longer in the repository"


class ModelRefresh:
    """Every method belongs to the event loop."""

    def __init__(self, models: TenantModels, frontends: Mapping[str, Frontend], model_loader: ModelLoader) -> None:
        self._models = models
        self._frontends = frontends
        self._model_loader = model_loader

    def __repr__(self) -> str:
        return f"<ModelRefresh of {self._models!r}>"

    async def refresh(self, tenant: str, name: str) -> str:
        """Serve a model of a tenant as the repository has it now; see `server.control.device_runtime.Models`."""
        reasons: list[str] = []
        await self._models.in_turn(tenant, partial(self._refresh, tenant, name, reasons))
        return "".join(reasons)

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
            await self._load(tenant, name, known, reasons)
        elif known:
            await self._take_away(tenant, name)

    async def _load(self, tenant: str, name: str, before: LoadedModel | None, reasons: list[str]) -> None:
        """Load it beside what is served of it, which stays if that fails: then the index has the reason as well."""
        kept = bool(before and before.served)
        loaded = await self._models.try_to_load(tenant, name, before.override if before else None, kept)
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
