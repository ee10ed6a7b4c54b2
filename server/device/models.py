"""The models of the tenants of this process; see `server.control.device_runtime.Models`."""

from collections.abc import Mapping, Sequence

from ..config.schema import ModelOptions
from ..control.descriptions import Execution, TenantMemory
from .model_lists import ModelLists
from .model_loader import NO_OPTIONS
from .refresh import ModelRefresh
from .tenant_models import TenantModels


class Models:
    """One model is loaded and unloaded by `tenant_models`, whole lists are changed by `lists`. Belongs to the event loop."""

    def __init__(self, tenant_models: TenantModels, lists: ModelLists, refresh: ModelRefresh) -> None:
        self._tenant_models = tenant_models
        self._lists = lists
        self._refresh = refresh

    def __repr__(self) -> str:
        return f"<Models {self._tenant_models!r}>"

    async def load(self, tenant: str, name: str, override: str | None = None) -> None:
        await self._tenant_models.load(tenant, name, override)

    async def unload(self, tenant: str, name: str) -> None:
        await self._tenant_models.unload(tenant, name)

    async def refresh(self, tenant: str, name: str) -> str:
        return await self._refresh.refresh(tenant, name)

    async def prepare(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = NO_OPTIONS) -> list[str]:
        return await self._lists.prepare(lists, options)

    async def use(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = NO_OPTIONS) -> None:
        await self._lists.use(lists, options)

    async def discard(self) -> None:
        await self._lists.discard()

    async def executions(self) -> list[Execution]:
        return self._tenant_models.executions()

    async def memory(self) -> list[TenantMemory]:
        return self._tenant_models.pager.memory()
