"""Which models each tenant is served with now, and what follows from that; nothing here waits or blocks."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..tenants.frontend import State
from ..workers.worker import Worker
from .model_loader import LoadedModel

UNLOADED = "unloaded"
"""Why a model is not there that was asked to go: that makes no server unready, however strict it is."""


class Execution(NamedTuple):
    """A model at a version, of a tenant's, and what its executor says of itself."""

    tenant: str
    name: str
    version: str
    description: Mapping[str, object]


class LoadedModels:
    """Every tenant's models that were tried, by name, those that failed or were unloaded included.

    Changed on the event loop only. The executors are not here: those of now are the worker's.
    """

    def __init__(self, tenants: Iterable[str], strict: bool) -> None:
        self._strict = strict
        self._models: dict[str, dict[str, LoadedModel]] = {name: {} for name in tenants}

    def __repr__(self) -> str:
        return f"<LoadedModels {'; '.join(f'{tenant}: {self.shown(tenant)}' for tenant in self._models)}>"

    def of(self, tenant: str) -> Mapping[str, LoadedModel]:
        """A tenant's models by name, as they are whenever they are looked at. Any thread may look."""
        return self._models[tenant]

    def put(self, tenant: str, loaded: LoadedModel) -> LoadedModel | None:
        """A tenant's model is this from now on. Returns what it was before, if it was tried before."""
        models = self._models[tenant]
        before = models.get(loaded.name)
        models[loaded.name] = replace(loaded, executors={})
        return before

    def serves(self, tenant: str, name: str) -> bool:
        """Whether some version of a tenant's model is served."""
        loaded = self._models[tenant].get(name)
        return bool(loaded and loaded.served)

    def ensembles(self, tenant: str, models: Collection[str]) -> list[LoadedModel]:
        """Those that run one of these models, or would if it were served."""
        return [loaded for loaded in self._models[tenant].values() if not set(loaded.steps).isdisjoint(models)]

    def state(self) -> State:
        """The state of a server that has tried every model: serving, or incomplete where it asks for all and one failed."""
        if not self._strict:
            return "serving"
        loaded = [each for models in self._models.values() for each in models.values()]
        failed = any(problem.reason != UNLOADED for each in loaded for problem in each.problems)
        return "incomplete" if failed else "serving"

    def executions(self, workers: Mapping[str, Worker]) -> list[Execution]:
        """Which way every model runs now on these workers, see `engines.Executor.describe`."""
        found = []
        for tenant, worker in workers.items():
            for served in (served for loaded in self._models[tenant].values() for served in loaded.served):
                if executor := worker.executors.get(served.key):
                    found.append(Execution(tenant, served.name, served.version, executor.describe()))
        return found

    def shown(self, tenant: str) -> str:
        """A tenant's models that are served, with their versions, in words."""
        return " and ".join(versions(loaded) for loaded in self._models[tenant].values() if loaded.served) or "nothing"


def versions(loaded: LoadedModel) -> str:
    """A model and its versions that are served, in words."""
    return f"{loaded.name} {', '.join(served.version for served in loaded.served)}"
