"""The models of each tenant, and the server state that follows from them. Nothing here awaits or blocks."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ..control.descriptions import Execution
from ..tenants.catalog import UNLOADED
from ..tenants.frontend import State
from ..workers.worker import Worker
from .loaded_model import LoadedModel


class LoadedModels:
    """Each tenant's models that were tried, by name, including those that failed or were unloaded.

    Changed on the event loop only. The executors are not here but in the tenant's current worker.
    """

    def __init__(self, tenants: Iterable[str], strict: bool) -> None:
        self._strict = strict
        self._models: dict[str, dict[str, LoadedModel]] = {name: {} for name in tenants}

    def __repr__(self) -> str:
        return f"<LoadedModels {'; '.join(f'{tenant}: {self.shown(tenant)}' for tenant in self._models)}>"

    def add(self, tenant: str) -> None:
        """A tenant without models has come."""
        self._models[tenant] = {}

    def remove(self, tenant: str) -> None:
        """This tenant has gone."""
        self._models.pop(tenant, None)

    def of(self, tenant: str) -> Mapping[str, LoadedModel]:
        """A live view of a tenant's models by name. Any thread may read it."""
        return self._models[tenant]

    def put(self, tenant: str, loaded: LoadedModel) -> LoadedModel | None:
        """Replace a tenant's model. Returns the one before, if there was one."""
        models = self._models[tenant]
        before = models.get(loaded.name)
        models[loaded.name] = replace(loaded, executors={})
        return before

    def forget(self, tenant: str, name: str) -> LoadedModel | None:
        """Know nothing of this model any more. Returns it, if it was known."""
        return self._models[tenant].pop(name, None)

    def serves(self, tenant: str, name: str) -> bool:
        """Whether at least one version of a tenant's model is served."""
        loaded = self._models[tenant].get(name)
        return bool(loaded and loaded.served)

    def ensembles(self, tenant: str, models: Collection[str]) -> list[LoadedModel]:
        """The ensembles that use one of these models as a step, served or not."""
        return [loaded for loaded in self._models[tenant].values() if not set(loaded.steps).isdisjoint(models)]

    def state(self) -> State:
        """The state once all models were tried: serving, or incomplete if all of all tenants failed, with `strict_readiness` if
        one did.
        """
        loaded = [each for models in self._models.values() for each in models.values()]
        failed = any(problem.reason != UNLOADED for each in loaded for problem in each.problems)
        return "incomplete" if failed and (self._strict or not any(each.served for each in loaded)) else "serving"

    def executions(self, workers: Mapping[str, Worker]) -> list[Execution]:
        """How each model runs on these workers now; see `engines.Executor.describe`."""
        found = []
        for tenant, worker in workers.items():
            for served in (served for loaded in self._models[tenant].values() for served in loaded.served):
                if executor := worker.executors.get(served.key):
                    found.append(Execution(tenant, served.name, served.version, executor.describe()))
        return found

    def shown(self, tenant: str) -> str:
        """A tenant's served models with their versions, for the log."""
        return " and ".join(versions(loaded) for loaded in self._models[tenant].values() if loaded.served) or "nothing"


def versions(loaded: LoadedModel) -> str:
    """A model and its served versions, for the log."""
    return f"{loaded.name} {', '.join(served.version for served in loaded.served)}"
