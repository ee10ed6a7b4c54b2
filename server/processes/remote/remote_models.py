"""Models of tenants whose device side is in another process; see `server.control.device_runtime.Models`."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType

from engines import EngineError
from partitions import PartitionError

from ...config.schema import ModelOptions
from ...control.descriptions import Execution, TenantMemory
from ...errors import RequestError, Unavailable
from ..channels import device_messages as messages
from ..channels.config_fields import options_fields
from .device_calls import DeviceCalls
from .device_frontend import DeviceFrontend
from .device_reports import DeviceReports
from .device_tenants import DeviceTenants
from .kept_lists import Lists
from .kept_state import KeptState

log = logging.getLogger("greenlane.processes")


class RemoteModels:
    """Belongs to the supervisor's event loop. What was changed on request is kept for a process that replaces this one."""

    def __init__(self, calls: DeviceCalls, tenants: DeviceTenants, kept: KeptState, reports: DeviceReports) -> None:
        self._calls = calls
        self._tenants = tenants
        self._kept = kept
        self._reports = reports

    def __repr__(self) -> str:
        return f"<RemoteModels of {self._calls.label}>"

    async def load(self, tenant: str, name: str, override: str | None = None) -> None:
        with _loading(self._tenants.frontends[tenant], name):
            await self._change(messages.LoadModel(tenant, name, override))

    async def unload(self, tenant: str, name: str) -> None:
        await self._change(messages.UnloadModel(tenant, name))

    async def refresh(self, tenant: str, name: str) -> str:
        """A process that replaces this one loads the files as they are then."""
        with suppress(_Refused), _loading(self._tenants.frontends[tenant], name):
            reason: str = await self._calls.call(messages.RefreshModel(tenant, name), str)
            if reason:
                raise _Refused(reason)
        return reason

    async def prepare(
        self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = MappingProxyType({})
    ) -> list[str]:
        found: list[str] = await self._calls.call(messages.PrepareModels(_plain(lists), options_fields(options)), list[str])
        return found

    async def use(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = MappingProxyType({})) -> None:
        """The lists are kept for a process that replaces this one, and what was loaded on request if they still have it."""
        self._kept.use_lists(lists)
        try:
            await self._calls.call(messages.UseModels(_plain(lists), options_fields(options)))
            self._kept.lists.on_used(lists)
        except Unavailable as error:
            log.warning("the next process uses the new models: %s", error)
            if options:
                self._calls.restart("it may have begun with the options of before")
        except (RequestError, EngineError, PartitionError) as error:
            self._calls.restart(f"it serves other models than its tenants may call: {error}")

    async def discard(self) -> None:
        with suppress(Unavailable):  # What a process had that has ended is gone.
            await self._calls.call(messages.DiscardModels())

    async def executions(self) -> list[Execution]:
        return await self._reports.executions()

    async def memory(self) -> list[TenantMemory]:
        return await self._reports.memory()

    async def _change(self, message: messages.LoadModel | messages.UnloadModel) -> None:
        await self._calls.call(message)
        self._kept.on_changed(message)


class _Refused(Exception):
    """A model cannot be served as the repository has it."""


@contextmanager
def _loading(frontend: DeviceFrontend, name: str) -> Iterator[None]:
    """Within the block a model is loaded, on each device of the tenant or on none."""
    frontend.begin_load(name)
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
        raise
    finally:
        frontend.end_load(name, error)


def _plain(lists: Mapping[str, Sequence[str]]) -> Lists:
    """As a message has them."""
    return {tenant: list(models) for tenant, models in lists.items()}
