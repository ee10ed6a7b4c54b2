"""The device side of some tenants in another process; see `server.control.device_runtime` for the contract.

A process that ends is replaced: `KeptState` has what its replacement is sent, so that it starts as this one was.
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

from ...accounts.usage import Report
from ...config.schema import ModelOptions
from ...config.tenant import TenantConfig
from ...control.descriptions import DeviceInfo, Execution, Pause, RungState, TenantMemory
from ...control.stretch import Wide, WideState
from ...errors import Conflict, RequestError, Unavailable
from ...link.ring import Descriptors
from ...tenants.catalog import IndexEntry
from ...tenants.frontend import State
from ..channels import device_messages as messages
from ..channels.config_fields import fields_of, options_fields
from ..channels.descriptors import DescriptorSender
from ..channels.device_fields import DeviceInfoFields, WideFields
from ..channels.messages import Message
from ..channels.rpc import Channel
from .device_frontend import DeviceFrontend
from .device_reports import DeviceReports
from .device_tenants import DeviceTenants
from .kept_lists import Lists
from .kept_state import Changes, KeptState

log = logging.getLogger("greenlane.processes")

_Units = dict[str, frozenset[int]]
_Cores = dict[str, frozenset[int] | None]


class RemoteRuntime:
    """Belongs to the supervisor's event loop. `connect` gives it each new process; `on_state` is called with its states."""

    def __init__(
        self, label: str, frontends: Mapping[str, DeviceFrontend], on_state: Callable[[Iterable[str], State], None]
    ) -> None:
        self.label = label
        self.tenants = DeviceTenants(frontends)
        self.kept = KeptState()
        self._on_state = on_state
        self._reports = DeviceReports(self._call)
        self._channel: Channel | None = None
        self._sender: DescriptorSender | None = None
        self._connected = asyncio.Event()
        self._started = False
        self._moving: dict[str, Granules] = {}
        self._mover: Channel | None = None
        """The process that prepared the last move."""
        self._resuming: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<RemoteRuntime {self.label} of {', '.join(self.frontends)}, {self._channel!r}>"

    @property
    def away(self) -> bool:
        return self.tenants.away

    @property
    def frontends(self) -> dict[str, DeviceFrontend]:
        """Those of its tenants, without tenants that are leaving."""
        return self.tenants.frontends

    def handlers(self) -> dict[type[Message], Callable[[Any], Any]]:
        """The handlers of what the process may send."""
        return {
            **self.tenants.handlers(),
            messages.DeviceState: lambda message: self._on_state(self.frontends, message.state),
            messages.LoadingModel: lambda message: self.kept.crashes.on_loading(message.tenant, message.name),
        }

    async def connect(self, channel: Channel, sender: DescriptorSender) -> None:
        """Use this process from now on; one that replaces another is started as that was. Raises as `open` and `start` do."""
        self._channel = channel
        self._connected.set()
        self.tenants.away = self._started
        if self.away:
            await channel.call(messages.OpenDevice(), DeviceInfoFields)
            if self.kept.affinity:
                channel.notify(self.kept.affinity)
            await channel.call(self.kept.start(), _Cores)
            self._resuming = asyncio.create_task(self._resume(channel))
        self._sender = sender  # Before its start the process has no worker that could change links.

    async def resumed(self, limit: float) -> None:
        """Wait until a process that replaces another serves as that did, or has ended, at most so many seconds."""
        if self._resuming:
            await asyncio.wait({self._resuming}, timeout=limit)

    def disconnect(self, reason: str) -> None:
        """The process has ended: all requests of its tenants fail with this reason, and new ones, until there is another."""
        self._channel = self._sender = None
        self._connected.clear()
        if self._resuming:
            self._resuming.cancel()
        self.kept.crashes.on_end(self.label)
        self.tenants.fail(reason)

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
        self.kept.on_started(granules)
        self._started = True
        return cores

    async def loaded(self) -> None:
        with suppress(Unavailable):  # A process that has ended loads no more; its replacement resumes its tenants by itself.
            await self._call(messages.WaitUntilLoaded())

    async def prepare(self, granules: Mapping[str, Granules]) -> _Units:
        self._moving, self._mover = dict(granules), self._channel
        found: _Units = await self._call(messages.PrepareMove(self._moving), _Units)
        return found

    async def settle(self) -> None:
        await self._call_mover(messages.SettleMove())

    async def halt(self) -> bool:
        halted: bool = await self._call_mover(messages.HaltMove(), bool)
        return halted

    async def commit(self) -> dict[str, Pause]:
        self.kept.on_moved(self._moving)
        try:
            pauses: dict[str, Pause] = await self._call_mover(messages.CommitMove(), dict[str, Pause])
            return pauses
        except (RequestError, PartitionError) as error:
            self.restart(f"its tenants have other granules now: {error}")  # Or it is being started with other ones.
            return {}

    async def switch(self) -> dict[str, Pause]:
        try:
            pauses: dict[str, Pause] = await self._call_mover(messages.SwitchMove(), dict[str, Pause])
        except Conflict:
            raise
        except (RequestError, PartitionError) as error:
            self.restart(f"a move failed, so it may have other granules than its tenants: {error}")
            raise
        self.kept.on_moved(self._moving)
        return pauses

    async def discard(self) -> None:
        with suppress(Unavailable):
            await self._call_mover(messages.DiscardMove())

    async def narrow(self, tenants: Collection[str]) -> None:
        self.kept.on_narrowed(tenants)
        with suppress(Unavailable):  # A process that has ended uses nothing.
            await self._call(messages.NarrowTenants(list(tenants)))

    async def stretch(self, plans: Mapping[str, Wide]) -> None:
        """What is planned is kept for a process that replaces this one."""
        self.kept.plans = dict(plans)
        await self._call(messages.StretchTenants({name: WideFields.of(plan) for name, plan in plans.items()}))

    async def hold(self, rungs: Mapping[str, Sequence[Granules]]) -> list[RungState]:
        """What is planned is kept for a process that replaces this one."""
        self.kept.rungs = {name: list(each) for name, each in rungs.items()}
        found: list[RungState] = await self._call(messages.HoldRungs(self.kept.rungs), list[RungState])
        return found

    async def stretches(self) -> list[WideState]:
        return await self._reports.stretches()

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
        self.kept.use_lists(lists)
        try:
            await self._call(messages.UseModels(_plain(lists), options_fields(options)))
            self.kept.lists.on_used(lists)
        except Unavailable as error:
            log.warning("the next process uses the new models: %s", error)
            if options:
                self.restart("it may have begun with the options of before")
        except (RequestError, EngineError, PartitionError) as error:
            self.restart(f"it serves other models than its tenants may call: {error}")

    async def discard_models(self) -> None:
        with suppress(Unavailable):  # What a process had that has ended is gone.
            await self._call(messages.DiscardModels())

    async def executions(self) -> list[Execution]:
        return await self._reports.executions()

    async def memory(self) -> list[TenantMemory]:
        return await self._reports.memory()

    async def usage(self) -> Report | None:
        return await self._reports.usage()

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
        self.kept.affinity = messages.SetDeviceAffinity(cores, builds)
        self._notify(self.kept.affinity)

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
        frontend: DeviceFrontend,
        granules: Granules,
        changes: Changes,
        models: list[str] | None = None,
    ) -> None:
        """The tenant is this device's from now on, and of every process that replaces this one. `models` is as for `adopt`."""
        self.kept.join(tenant, granules, changes, models)
        self.frontends[tenant] = frontend
        if self.away:  # It ended when the tenant was not in it yet.
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
        self.tenants.leave(tenant)
        return self.kept.leave(tenant), self.kept.changes(tenant)

    def stay(self, tenant: str, granules: Granules) -> None:
        """Undo `leave`."""
        self.tenants.stay(tenant)
        self.kept.stay(tenant, granules)

    async def release(self, tenant: str) -> None:
        """Free everything that the process has of a tenant that it does not serve any more."""
        self.tenants.release(tenant)
        self.kept.release(tenant)
        with suppress(Unavailable):
            await self._call(messages.ReleaseTenant(tenant))

    async def _change(self, message: messages.LoadModel | messages.UnloadModel) -> None:
        await self._call(message)
        self.kept.on_changed(message)

    async def _resume(self, channel: Channel) -> None:
        """Serve the tenants of a process that replaces another once the same models are loaded."""
        for message in (messages.WaitUntilLoaded(), *self.kept.requested()):
            try:
                await channel.call(message)
            except (RequestError, EngineError, PartitionError) as error:
                if channel.closed.is_set():  # It is replaced as well.
                    return
                log.warning("not as before in %s: %s", self.label, error)
        await self.tenants.forget_models(self._not_found_again)
        while late := self.kept.lists.late():  # They were changed while it loaded.
            try:
                await channel.call(messages.UseModels(late))
            except (RequestError, EngineError, PartitionError) as error:
                if channel.closed.is_set():
                    return
                log.warning("not all models may be as configured in %s: %s", self.label, error)
        log.info("%s serves again: %s", self.label, ", ".join(self.frontends) or "no tenant")
        self.tenants.resume()
        if self.kept.plans:
            with suppress(RequestError):
                await self.stretch(self.kept.plans)
        if self.kept.rungs:  # Not waited for: connections wait for the end of this.
            channel.call(messages.HoldRungs(self.kept.rungs), list[RungState]).add_done_callback(_ignore)

    def _not_found_again(self, tenant: str, name: str) -> list[IndexEntry]:
        """The problem of a model that only the process before had published; none if the tenant may not call it any more."""
        problem = IndexEntry(name, "", "UNAVAILABLE", "no longer in the repository when its device was started again")
        return [problem] if self.kept.lists.allows(tenant, name) else []

    def _notify(self, message: Message) -> None:
        if self._channel:
            self._channel.notify(message)

    async def _call(self, message: Message, result: Any = None) -> Any:
        """The answer. Raises Unavailable if there is no process, it does not serve yet, or it ends before it answers."""
        channel = self._channel
        if channel and not self.away:
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


def _ignore(answer: "asyncio.Future[Any]") -> None:
    """Nothing waits for this answer; what went wrong is in the process's log."""
    if not answer.cancelled():
        answer.exception()
