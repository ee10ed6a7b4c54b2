"""The device side of some tenants in another process; see `server.control.device_runtime` for the contract.

What the process was sent last is kept, so that its replacement starts as it was: with the same tenants on the same granules.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

from engines import EngineError
from partitions import DeviceUnavailable, PartitionError
from partitions.plan import Granules

from ..accounts.usage import Report
from ..config.schema import ModelOptions
from ..config.tenant import TenantConfig
from ..control.descriptions import DeviceInfo, Execution, Pause, RungState, TenantMemory
from ..control.stretch import Wide, WideState
from ..errors import Conflict, RequestError, Unavailable
from ..link.ring import Descriptors
from ..tenants.catalog import IndexEntry
from ..tenants.frontend import State
from . import device_messages as messages
from .crashes import LoadCrashes
from .descriptors import DescriptorSender
from .device_messages import (
    DeviceInfoFields,
    ExecutionFields,
    TenantMemoryFields,
    UsageReportFields,
    WideFields,
    WideStateFields,
)
from .kept_lists import KeptLists, Lists
from .linked_frontend import LinkedFrontend
from .messages import Message, fields_of, options_fields
from .report_source import REPORT_TIMEOUT
from .rpc import Channel

log = logging.getLogger("greenlane.processes")

Changes = dict[str, messages.LoadModel | messages.UnloadModel]
_NOT_FOUND_AGAIN = "no longer in the repository when its device was started again"
_Units = dict[str, frozenset[int]]
_Cores = dict[str, frozenset[int] | None]


class RemoteRuntime:
    """Belongs to the supervisor's event loop. `connect` gives it each new process; `on_state` is called with its states."""

    def __init__(
        self, label: str, frontends: Mapping[str, LinkedFrontend], on_state: Callable[[Iterable[str], State], None]
    ) -> None:
        self.label = label
        self.frontends: dict[str, LinkedFrontend] = dict(frontends)
        self._on_state = on_state
        self._channel: Channel | None = None
        self._sender: DescriptorSender | None = None
        self._connected = asyncio.Event()
        self._leaving: dict[str, LinkedFrontend] = {}
        """Tenants that this process still serves, but no replacement of it: they are moving to another device."""
        self._started = False
        self._away = False
        """Whether the process has ended, and no other one has loaded the same models yet."""
        self._reasons: dict[str, str] = {}
        """Why the process itself has its tenants suspended."""
        self._published: set[tuple[str, str]] = set()
        self._granules: dict[str, Granules] = {}
        self._moving: dict[str, Granules] = {}
        self._crashes = LoadCrashes()
        self._mover: Channel | None = None
        """The process that prepared the last move."""
        self._executions: list[Execution] = []
        self._memory: list[TenantMemory] = []
        self._changes: dict[tuple[str, str], messages.LoadModel | messages.UnloadModel] = {}
        self.lists = KeptLists()
        self._affinity: messages.SetDeviceAffinity | None = None
        self._plans: Mapping[str, Wide] = {}
        self._rungs: dict[str, list[Granules]] = {}
        self._states: list[WideState] = []
        self._resuming: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<RemoteRuntime {self.label} of {', '.join(self.frontends)}, {self._channel!r}>"

    @property
    def away(self) -> bool:
        return self._away

    def handlers(self) -> dict[type[Message], Callable[[Any], Any]]:
        """The handlers of what the process may send."""
        return {
            messages.DeviceState: lambda message: self._on_state(self.frontends, message.state),
            messages.ReportDeviceLost: lambda message: self._suspend(f"the device is lost: {message.reason}"),
            messages.LoadingModel: lambda message: self._crashes.on_loading(message.tenant, message.name),
            messages.AnnounceModel: self._announce,
            messages.AgreeOnModel: self._agree,
            messages.PublishModel: self._publish,
            messages.GetTenantUses: self._last_uses,
            messages.PageOutModel: self._page_out,
            messages.PageInModel: self._page_in,
            messages.SetTenantCores: self._set_cores,
            messages.SuspendTenant: self._suspend_tenant,
        }

    async def connect(self, channel: Channel, sender: DescriptorSender) -> None:
        """Use this process from now on; one that replaces another is started as that was. Raises as `open` and `start` do."""
        self._channel = channel
        self._connected.set()
        self._away = self._started
        if self._away:
            await channel.call(messages.OpenDevice(), DeviceInfoFields)
            if self._affinity:
                channel.notify(self._affinity)
            left_out, lists = dict(self._crashes.left_out()), self.lists.at_start()
            await channel.call(messages.StartTenants(dict(self._granules), left_out, lists), _Cores)
            self._resuming = asyncio.create_task(self._resume(channel))
        self._sender = sender  # Before its start the process has no worker that could change links.

    async def resumed(self, limit: float) -> None:
        """Wait until a process that replaces another serves as that did, or has ended, at most so many seconds."""
        if self._resuming:
            await asyncio.wait({self._resuming}, timeout=limit)

    def disconnect(self, reason: str) -> None:
        """The process has ended: all requests of its tenants fail with this reason, and new ones, until there is another."""
        self._channel = self._sender = None
        self._away = True
        self._crashes.on_end(self.label)
        self._reasons.clear()
        self._published.clear()
        self._connected.clear()
        if self._resuming:
            self._resuming.cancel()
        for frontend in self.frontends.values():
            frontend.fail_in_flight(reason)
        for frontend in self._leaving.values():
            frontend.fail_in_flight(reason, queued=False)  # The other device serves what waits.

    async def open(self) -> DeviceInfo:
        await self._connected.wait()
        try:
            found: DeviceInfoFields = await self._call(messages.OpenDevice(), DeviceInfoFields)
        except Unavailable as error:
            raise DeviceUnavailable(f"{self.label} ended while it opened the device; the log says why") from error
        return found.info()

    async def start(self, granules: Mapping[str, Granules]) -> _Cores:
        try:
            cores: _Cores = await self._call(messages.StartTenants(dict(granules)), _Cores)
        except Unavailable as error:
            raise DeviceUnavailable(f"{self.label} ended while it partitioned the device; the log says why") from error
        self._granules, self._started = dict(granules), True
        return cores

    async def loaded(self) -> None:
        with suppress(Unavailable):  # A process that has ended loads no more; its replacement resumes its tenants by itself.
            await self._call(messages.WaitUntilLoaded())

    async def prepare(self, granules: Mapping[str, Granules]) -> _Units:
        self._moving, self._mover = dict(granules), self._channel
        found: _Units = await self._call(messages.PrepareMove(self._moving), _Units)
        return found

    async def halt(self) -> None:
        await self._call_mover(messages.HaltMove())

    async def commit(self) -> dict[str, Pause]:
        self._granules |= self._moving
        self._plans = {}
        try:
            pauses: dict[str, Pause] = await self._call_mover(messages.CommitMove(), dict[str, Pause])
            return pauses
        except (RequestError, PartitionError) as error:
            if self._channel:  # It has other granules than its tenants now, or is being started with other ones.
                log.error("%s is started again, as its tenants have other granules now: %s", self.label, error)
                self._channel.close()
            return {}

    async def switch(self) -> dict[str, Pause]:
        try:
            pauses: dict[str, Pause] = await self._call_mover(messages.SwitchMove(), dict[str, Pause])
        except Conflict:
            raise
        except (RequestError, PartitionError) as error:
            if self._channel:  # It may have other granules than its tenants.
                log.error("%s is started again, as a move failed: %s", self.label, error)
                self._channel.close()
            raise
        self._granules |= self._moving
        self._plans = {}
        return pauses

    async def discard(self) -> None:
        with suppress(Unavailable):
            await self._call_mover(messages.DiscardMove())

    async def narrow(self, tenants: Collection[str]) -> None:
        self._plans = {name: plan for name, plan in self._plans.items() if name not in tenants}
        with suppress(Unavailable):  # A process that has ended uses nothing.
            await self._call(messages.NarrowTenants(list(tenants)))

    async def stretch(self, plans: Mapping[str, Wide]) -> None:
        """What is planned is kept for a process that replaces this one."""
        self._plans = dict(plans)
        await self._call(messages.StretchTenants({name: WideFields.of(plan) for name, plan in plans.items()}))

    async def hold(self, rungs: Mapping[str, Sequence[Granules]]) -> list[RungState]:
        """What is planned is kept for a process that replaces this one."""
        self._rungs = {name: list(each) for name, each in rungs.items()}
        found: list[RungState] = await self._call(messages.HoldRungs(self._rungs), list[RungState])
        return found

    async def stretches(self) -> list[WideState]:
        """The last ones that are known if the process does not answer within `REPORT_TIMEOUT`."""
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT):
                found: list[WideStateFields] = await self._call(messages.GetStretches(), list[WideStateFields])
            self._states = [each.state() for each in found]
        return self._states

    async def load(self, tenant: str, name: str, override: str | None = None) -> None:
        with _loading(self.frontends[tenant], name):
            await self._change(messages.LoadModel(tenant, name, override))

    async def unload(self, tenant: str, name: str) -> None:
        await self._change(messages.UnloadModel(tenant, name))

    async def refresh(self, tenant: str, name: str) -> str:
        """A process that replaces this one loads the files as they are then."""
        with suppress(_Refused), _loading(self.frontends[tenant], name):
            reason: str = await self._call(messages.RefreshModel(tenant, name), str)
            if reason:
                raise _Refused(reason)
        return reason

    async def prepare_models(
        self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = MappingProxyType({})
    ) -> list[str]:
        found: list[str] = await self._call(messages.PrepareModels(_plain(lists), options_fields(options)), list[str])
        return found

    async def use_models(
        self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = MappingProxyType({})
    ) -> None:
        """The lists are kept for a process that replaces this one, and what was loaded on request if they still have it."""
        self.lists.use(lists)
        for tenant, name in [key for key in self._changes if not self.lists.allows(*key)]:
            del self._changes[tenant, name]
        try:
            await self._call(messages.UseModels(_plain(lists), options_fields(options)))
            self.lists.on_used(lists)
        except Unavailable as error:
            log.warning("the next process uses the new models: %s", error)
            if options:
                self.restart("it may have begun with the options of before")
        except (RequestError, EngineError, PartitionError) as error:
            if self._channel:  # It serves other models than its tenants may call.
                log.error("%s is started again, as its tenants may call other models now: %s", self.label, error)
                self._channel.close()

    async def discard_models(self) -> None:
        with suppress(Unavailable):  # What a process had that has ended is gone.
            await self._call(messages.DiscardModels())

    async def executions(self) -> list[Execution]:
        """The last ones that are known if the process does not answer within `REPORT_TIMEOUT`."""
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT):
                found: list[ExecutionFields] = await self._call(messages.GetExecutions(), list[ExecutionFields])
            self._executions = [each.execution() for each in found]
        return self._executions

    async def memory(self) -> list[TenantMemory]:
        """The last that is known if the process does not answer within `REPORT_TIMEOUT`."""
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT):
                found: list[TenantMemoryFields] = await self._call(messages.GetMemory(), list[TenantMemoryFields])
            self._memory = [each.tenant_memory() for each in found]
        return self._memory

    async def usage(self) -> Report | None:
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT):
                found: UsageReportFields = await self._call(messages.GetUsage(), UsageReportFields)
            return found.report()
        return None

    async def probe(self) -> _Units:
        found: _Units = await self._call(messages.ProbePartitions(), _Units)
        return found

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        """Cancel a tenant's ticket, if it can be."""
        self._notify(messages.CancelTenantTicket(tenant, slot, serial))

    def stop_loading(self) -> None:
        self._notify(messages.StopLoading())

    def abandon(self, reason: str) -> None:
        self._notify(messages.Abandon(reason))

    def set_affinity(self, cores: frozenset[int], builds: frozenset[int]) -> None:
        """Restrict the process, and the children that build models, to these of the host's cores."""
        self._affinity = messages.SetDeviceAffinity(cores, builds)
        self._notify(self._affinity)

    async def replace_link(self, tenant: str) -> None:
        """Have the process serve the new link of this tenant's frontend; returns when it does not use the old one any more.

        Without a process there is nothing to do: the next one starts with the new link. A process that cannot do so is
        replaced.
        """
        if self._sender and (channel := self._channel):
            link = self.frontends[tenant].descriptors
            try:
                number = self._sender.send(link[:4])
                await channel.call(messages.ReplaceLink(tenant, number, link.slots, link.nbytes))
            except RequestError as error:
                if not channel.closed.is_set():
                    log.error("%s cannot change the link of %s; starting another: %s", self.label, tenant, error)
                    channel.close()

    async def close(self) -> None:
        if self._resuming:
            self._resuming.cancel()
        with suppress(Unavailable):
            await self._call(messages.CloseDevice())

    def process(self) -> object:
        """The current process: the same object as long as it is the same one. None if there is none."""
        return self._channel

    async def adopt(
        self,
        tenant: str,
        link: Descriptors,
        granules: Granules,
        changes: Changes,
        beyond: int,
        models: list[str] | None = None,
        config: TenantConfig | None = None,
    ) -> list[messages.PublishModel]:
        """Make a tenant of another device ready beside the tenants of this one, on a link to its memory that is not in use.

        `models` is its list of models if that was changed since the start, and `config` is set for one that the process does
        not know. Returns its models, which are not published; their keys have numbers above `beyond`. Raises as `start` does,
        and Unavailable; nothing is left of it then.
        """
        if self._sender is None:
            raise Unavailable(f"{self.label} has ended and is being started again")
        number, fields = self._sender.send(link[:4]), fields_of(config) if config else None
        message = messages.AdoptTenant(
            tenant, number, link.slots, link.nbytes, granules, list(changes.values()), beyond, models, fields
        )
        try:
            found: list[messages.PublishModel] = await self._call(message, list[messages.PublishModel])
        except Unavailable as error:
            raise Unavailable(f"{self.label} ended while it prepared tenant {tenant}; nothing has changed") from error
        return found

    def join(
        self,
        tenant: str,
        frontend: LinkedFrontend,
        granules: Granules,
        changes: Changes,
        models: list[str] | None = None,
    ) -> None:
        """The tenant is this device's from now on, and of every process that replaces this one. `models` is as for `adopt`."""
        if models is not None:
            self.lists.use({tenant: models})
            self.lists.on_used({tenant: models})
        self.frontends[tenant], self._granules[tenant] = frontend, granules
        self._changes |= {(tenant, name): change for name, change in changes.items()}
        if self._away:  # It ended when the tenant was not in it yet.
            frontend.fail_in_flight(f"{self.label} has ended and is being started again")

    async def serve_adopted(self, tenant: str, keys: Mapping[str, str]) -> None:
        """Serve its link; `keys` are those by which its queued requests name models, and those of the models here."""
        with suppress(Unavailable):  # The process has ended; its replacement starts with the tenant.
            await self._call(messages.NameModels(tenant, dict(keys)))
            await self.replace_link(tenant)

    async def forget_keys(self, tenant: str, keys: Iterable[str]) -> None:
        """No request names a model by these keys any more."""
        with suppress(Unavailable):
            await self._call(messages.ForgetKeys(tenant, list(keys)))

    def restart(self, why: str) -> None:
        """End the process, if there is one: the next one starts with the tenants of now."""
        if self._channel:
            log.error("%s is started again: %s", self.label, why)
            self._channel.close()

    def leave(self, tenant: str) -> tuple[Granules, Changes]:
        """Serve the tenant on, but not after this process was replaced. Returns its granules, and the changes of its models."""
        self._leaving[tenant] = self.frontends.pop(tenant)
        return self._granules.pop(tenant), self.changes(tenant)

    def stay(self, tenant: str, granules: Granules) -> None:
        """Undo `leave`."""
        self.frontends[tenant], self._granules[tenant] = self._leaving.pop(tenant), granules

    async def release(self, tenant: str) -> None:
        """Free everything that the process has of a tenant that it does not serve any more."""
        self._leaving.pop(tenant, None)
        self._reasons.pop(tenant, None)
        self.lists.remove(tenant)
        for key in [key for key in self._changes if key[0] == tenant]:
            del self._changes[key]
        with suppress(Unavailable):
            await self._call(messages.ReleaseTenant(tenant))

    def changes(self, tenant: str) -> Changes:
        """The models of a tenant that were loaded and unloaded on request, by name, as the last request says."""
        return {name: change for (owner, name), change in self._changes.items() if owner == tenant}

    def _announce(self, message: messages.AnnounceModel) -> None:
        if frontend := self.frontends.get(message.tenant):
            frontend.announce(message.name)

    async def _agree(self, message: messages.AgreeOnModel) -> str:
        frontend = self.frontends.get(message.tenant)
        return await frontend.agree(message.name) if frontend else ""

    async def _publish(self, message: messages.PublishModel) -> bool:
        if (frontend := self.frontends.get(message.tenant)) is None:  # It has moved to another device.
            return False
        served = [each.served() for each in message.served]
        self._published.add((message.tenant, message.name))
        return await frontend.publish(message.name, served, message.problems)

    async def _last_uses(self, message: messages.GetTenantUses) -> dict[str, int]:
        frontend = self.frontends.get(message.tenant)
        return dict(await frontend.last_uses()) if frontend else {}

    async def _page_out(self, message: messages.PageOutModel) -> bool:
        frontend = self.frontends.get(message.tenant)
        return frontend is not None and await frontend.page_out(message.model)

    def _page_in(self, message: messages.PageInModel) -> None:
        if frontend := self.frontends.get(message.tenant):
            frontend.page_in(message.model)

    def _set_cores(self, message: messages.SetTenantCores) -> None:
        if frontend := self.frontends.get(message.tenant):
            frontend.set_cores(message.cores)

    def _suspend_tenant(self, message: messages.SuspendTenant) -> None:
        self._reasons[message.tenant] = message.reason
        if not self._away and (frontend := self.frontends.get(message.tenant) or self._leaving.get(message.tenant)):
            frontend.suspend(message.reason)

    async def _change(self, message: messages.LoadModel | messages.UnloadModel) -> None:
        await self._call(message)
        self._changes[message.tenant, message.name] = message

    async def _resume(self, channel: Channel) -> None:
        """Serve the tenants of a process that replaces another once the same models are loaded."""
        changes = [each for key, each in self._changes.items() if not self._crashes.crashes(*key)]
        for message in (messages.WaitUntilLoaded(), *changes):
            try:
                await channel.call(message)
            except (RequestError, EngineError, PartitionError) as error:
                if channel.closed.is_set():  # It is replaced as well.
                    return
                log.warning("not as before in %s: %s", self.label, error)
        for tenant, frontend in list(self.frontends.items()):
            for name in {each.name for each in frontend.served() if (tenant, each.name) not in self._published}:
                problem = IndexEntry(name, "", "UNAVAILABLE", _NOT_FOUND_AGAIN)
                await frontend.publish(name, [], [problem] if self.lists.allows(tenant, name) else [])
        while late := self.lists.late():  # They were changed while it loaded.
            try:
                await channel.call(messages.UseModels(late))
            except (RequestError, EngineError, PartitionError) as error:
                if channel.closed.is_set():
                    return
                log.warning("not all models may be as configured in %s: %s", self.label, error)
        log.info("%s serves again: %s", self.label, ", ".join(self.frontends) or "no tenant")
        self._away = False
        for tenant, frontend in self.frontends.items():
            frontend.suspend(self._reasons.get(tenant, ""))
        if self._plans:
            with suppress(RequestError):
                await self.stretch(self._plans)
        if self._rungs:  # Not waited for: connections wait for the end of this.
            channel.call(messages.HoldRungs(self._rungs), list[RungState]).add_done_callback(_ignore)

    def _suspend(self, reason: str) -> None:
        for frontend in self.frontends.values():
            frontend.suspend(reason)

    def _notify(self, message: Message) -> None:
        if self._channel:
            self._channel.notify(message)

    async def _call(self, message: Message, result: Any = None) -> Any:
        """The answer. Raises Unavailable if there is no process, it does not serve yet, or it ends before it answers."""
        channel = self._channel
        if channel and not self._away:
            try:
                return await channel.call(message, result)
            except Unavailable:
                if not channel.closed.is_set():
                    raise
        raise Unavailable(f"{self.label} has ended and is being started again")

    async def _call_mover(self, message: Message, result: Any = None) -> Any:
        """Call the process that prepared the move. Raises Unavailable if it has ended, also if another one has replaced it."""
        if self._mover is None or self._mover is not self._channel:
            raise Unavailable(f"{self.label} has ended during a move, and is being started again")
        return await self._call(message, result)


class _Refused(Exception):
    """A model cannot be served as the repository has it."""


@contextmanager
def _loading(frontend: LinkedFrontend, name: str) -> Iterator[None]:
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


def _ignore(answer: "asyncio.Future[Any]") -> None:
    """Nothing waits for this answer; what went wrong is in the process's log."""
    if not answer.cancelled():
        answer.exception()
