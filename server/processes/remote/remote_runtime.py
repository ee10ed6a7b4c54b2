"""The device side of some tenants in another process; see `server.control.device_runtime` for the contract.

A process that ends is replaced: `KeptState` has what its replacement is sent, so that it starts as this one was. Tenants come
and go by its `TenantHandover`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from time import monotonic

from engines import EngineError
from partitions import DeviceUnavailable, PartitionError
from partitions.plan import Granules
from partitions.probe import Placement
from partitions.strain import Strain, Strained

from ...accounts.usage import Report, TenantUsages
from ...config.tenant import TenantConfig
from ...control.descriptions import AS_CONFIGURED, DeviceInfo, Loading
from ...control.device_runtime import Models, Placements
from ...errors import RequestError, Unavailable
from ...link.ring import Descriptors
from ...tenants.catalog import IndexEntry
from ...tenants.frontend import HttpSide, State
from ..channels.calls import proxy, send, serve
from ..channels.descriptors import MOST, DescriptorSender
from ..channels.device_protocols import FromRuntime, ToDeviceProcess, ToRuntime
from ..channels.rpc import Channel, Handlers
from .device_tenants import DeviceTenants
from .http_processes import in_time
from .kept_state import Changes, KeptState
from .remote_device import DeviceCalls, RemoteModels, RemoteMoves, RemotePlacements
from .remote_frontend import RemoteFrontend

log = logging.getLogger("greenlane.processes")


class TenantHandover:
    """Belongs to the supervisor's event loop. A tenant comes by `adopt`, `join` and `serve_adopted`, or by `join` alone where a
    process is being started; it goes by `leave` and `release`."""

    def __init__(self, calls: DeviceCalls, tenants: DeviceTenants, kept: KeptState) -> None:
        self._calls = calls
        self._process = proxy(ToDeviceProcess, calls)
        self._tenants = tenants
        self._kept = kept
        self._adopted: dict[str, Channel | None] = {}
        """The process that has made each tenant ready."""

    async def adopt(
        self,
        tenant: str,
        link: Descriptors,
        granules: Granules,
        changes: Changes,
        beyond: int,
        models: list[str] | None = None,
        *,
        config: TenantConfig,
        http_side: HttpSide,
    ) -> None:
        """Make a tenant of another device ready beside the tenants of this one, on a link to its memory that is not in use.

        `models` is its list of models if that was changed since the start. Until `join` it calls `http_side`, where its models'
        keys have numbers above `beyond`. Raises as `start` does, and Unavailable; nothing is left of it then.
        """
        if self._calls.sender is None:
            raise self._calls.gone()
        sent = self._calls.sender.send_link(link)
        self._tenants.come(tenant, http_side)
        self._adopted[tenant] = self._calls.channel
        try:
            await self._process.adopt(tenant, sent, granules, list(changes.values()), beyond, models, config)
        except BaseException as error:
            self._tenants.release(tenant)
            if isinstance(error, Unavailable):
                gone = f"{self._calls.label} ended while it prepared tenant {tenant}; nothing has changed"
                raise Unavailable(gone) from error
            raise

    def join(
        self, tenant: str, frontend: RemoteFrontend, granules: Granules, changes: Changes, models: list[str] | None = None
    ) -> None:
        """The tenant is this device's from now on, and of every process that replaces this one. `models` is as for `adopt`."""
        self._kept.join(tenant, granules, changes, models)
        self._tenants.join(tenant, frontend)
        if self._tenants.away:  # It ended when the tenant was not in it, and the next one may have been started without it.
            frontend.fail_in_flight(str(self._calls.gone()))
            self._calls.restart(f"tenant {tenant} has come while it was started")

    def has_adopted(self, tenant: str) -> bool:
        """Whether the process that has made this tenant ready has not ended."""
        return self._adopted.get(tenant) is self._calls.channel

    async def serve_adopted(self, tenant: str, keys: Mapping[str, str]) -> None:
        """Serve its link; `keys` are those by which its queued requests name models, and those of the models here.

        A process that was started meanwhile is replaced, as it may know nothing of the tenant.
        """
        if not self.has_adopted(tenant):
            self._calls.restart(f"tenant {tenant} has come while it was started")
            return
        with suppress(Unavailable):  # The process has ended; its replacement starts with the tenant.
            await self._process.name_models(tenant, keys)
            await self.replace_link(tenant)

    async def forget_keys(self, tenant: str, keys: Iterable[str]) -> None:
        """No request names a model by these keys any more."""
        with suppress(Unavailable):
            await self._process.forget_keys(tenant, list(keys))

    def leave(self, tenant: str) -> tuple[Granules, Changes]:
        """Serve the tenant on, but not after this process was replaced. Returns its granules, and the changes of its models."""
        self._tenants.leave(tenant)
        return self._kept.leave(tenant), self._kept.changes(tenant)

    def stay(self, tenant: str, granules: Granules) -> None:
        """Undo `leave`."""
        self.join(tenant, self._tenants.left(tenant), granules, {})

    async def release(self, tenant: str) -> None:
        """Free everything that the process has of a tenant that it does not serve any more; a process that has no other tenant
        and does not do so in time is ended.
        """
        self._tenants.release(tenant)
        self._kept.release(tenant)
        self._adopted.pop(tenant, None)
        limit = None if self._tenants.frontends else RELEASE_LIMIT
        with suppress(Unavailable):
            try:
                async with asyncio.timeout(limit):
                    await self._process.release(tenant)
            except TimeoutError:
                self._calls.restart(f"it has not freed tenant {tenant} within {limit:g} s")

    def set_pages(self, pages: Mapping[str, int]) -> None:
        """Have the process know these activity pages of tenants, which it need not serve.

        Without a process that takes descriptors there is nothing to do: it is sent all pages when it does.
        """
        names = list(pages)
        for tenants in (names[at : at + MOST] for at in range(0, len(names), MOST)):  # A socket holds few messages.
            if (sender := self._calls.sender) and (channel := self._calls.channel):
                try:
                    number = sender.send([pages[tenant] for tenant in tenants])
                except Unavailable as error:
                    self._calls.restart(f"it cannot be sent the activity pages of {', '.join(tenants)}: {error}")
                    return
                send(proxy(ToDeviceProcess, channel).set_pages(tenants, number))

    def forget_page(self, tenant: str) -> None:
        """Have the process know that the page of this tenant has gone."""
        if self._calls.sender and (channel := self._calls.channel):
            send(proxy(ToDeviceProcess, channel).set_pages([tenant], None))

    async def replace_link(self, tenant: str) -> None:
        """Have the process serve the new link of this tenant's frontend; returns when it does not use the old one any more.

        Without a process there is nothing to do: the next one starts with the new link. A process that cannot do so is
        replaced.
        """
        if self._calls.sender and (channel := self._calls.channel):
            link = self._tenants.frontends[tenant].descriptors
            try:
                await proxy(ToDeviceProcess, channel).replace_link(tenant, self._calls.sender.send_link(link))
            except RequestError as error:
                if not channel.closed.is_set():
                    log.error("%s cannot change the link of %s; starting another: %s", self._calls.label, tenant, error)
                    channel.close()


OPEN_LIMIT = 120.0
"""Seconds in which a process that comes while others are served has to open its device: the driver may hang for ever."""
RELEASE_LIMIT = 30.0
"""Seconds in which a process frees its last tenant; what the tenant had in flight has ended before."""
_MOST_UNREAD = 1 << 20
"""Bytes that the process has not read, with which it is sent no cancellations: they take some 40 each."""
_Cores = dict[str, frozenset[int] | None]


class RemoteRuntime:
    """Belongs to the supervisor's event loop. `connect` gives it each new process; `on_state` is called with its states, and
    `on_loading` with what it loads.
    """

    def __init__(
        self,
        label: str,
        frontends: Mapping[str, RemoteFrontend],
        on_state: Callable[[Iterable[str], State], None],
        on_loading: Callable[[Loading], None] = lambda _: None,
    ) -> None:
        self.label = label
        self.kept = KeptState()
        self.tenants = DeviceTenants(frontends, self.kept.lists.allows)
        self._calls = DeviceCalls(label, self.tenants)
        self.moves = RemoteMoves(self._calls, self.kept)
        self.placements = RemotePlacements(self._calls, self.kept)
        self.models = RemoteModels(self._calls, self.kept)
        self.handover = TenantHandover(self._calls, self.tenants, self.kept)
        self.end: Callable[[str], None] = lambda _: None
        """Called with the reason for which the process asks to be ended."""
        self._process, self._device = proxy(ToRuntime, self._calls), proxy(ToDeviceProcess, self._calls)
        self._on_state = on_state
        self._on_loading = on_loading
        self.processes = 0
        self._started = False
        self._resuming: asyncio.Task[None] | None = None
        self._ended = 0.0
        """When the last process had, in seconds of the monotonic clock."""

    @property
    def away(self) -> bool:
        return self.tenants.away

    @property
    def frontends(self) -> dict[str, RemoteFrontend]:
        """Those of its tenants, without tenants that are leaving."""
        return self.tenants.frontends

    def handlers(self) -> Handlers:
        """The handlers of what the process may call."""
        return {**self.handlers_of_hosted(), **serve(HttpSide, 1)(self.tenants.http_side)}

    def handlers_of_hosted(self) -> Handlers:
        """The same for a tenant's own process, which has the HTTP side as well."""
        return serve(FromRuntime)(lambda: self)

    def on_state(self, state: State) -> None:
        self._on_state(self.frontends, state)

    def on_lost(self, reason: str) -> None:
        self.tenants.lose(reason)

    def on_stuck(self, reason: str) -> None:
        self.end(reason)

    def on_loading(self, loading: Loading) -> None:
        if loading.tenant not in self.tenants or (loading.model and not self.kept.names.keep(loading.tenant, loading.model)):
            return
        self.kept.crashes.on_loading(loading.tenant, "" if loading.apart else loading.model)
        self._on_loading(loading)

    async def connect(self, channel: Channel, sender: DescriptorSender) -> None:
        """Use this process from now on; one that replaces another is started as that was. Raises as `open` and `start` do."""
        self._calls.connect(channel)
        self.processes += 1
        self.tenants.away = self._started
        if self.away:
            process = proxy(ToRuntime, channel)
            steps = [self._ended, monotonic()]
            await _opened(process, OPEN_LIMIT)
            steps.append(monotonic())
            if self.kept.affinity:
                cores, builds = self.kept.affinity
                proxy(ToDeviceProcess, channel).set_affinity(cores, builds, cores)
            await process.start(*self.kept.start(self.frontends))
            steps.append(monotonic())
            self.tenants.serve()
            self._resuming = asyncio.create_task(self._resume(channel, steps))
        self._calls.sender = sender  # Before its start the process has no worker that could change links.

    async def resumed(self, limit: float) -> None:
        """Wait until a process that replaces another serves as that did, or has ended, at most so many seconds."""
        if self._resuming:
            await asyncio.wait({self._resuming}, timeout=limit)

    def disconnect(self, reason: str) -> None:
        """The process has ended: all requests of its tenants fail with this reason, and new ones, until there is another."""
        self._calls.disconnect()
        self.placements.forget_ready()
        self._ended = monotonic()
        if self._resuming:
            self._resuming.cancel()
        self.kept.crashes.on_end(self.label)
        self.tenants.fail(reason)

    async def open(self, limit: float | None = None) -> DeviceInfo:
        """As `DeviceRuntime.open`. Raises DeviceUnavailable, too, if the process takes longer than `limit` seconds."""
        await self._calls.connected.wait()
        try:
            return await _opened(self._process, limit)
        except Unavailable as error:
            raise PartitionError(f"{self.label} ended while it opened the device; the log says why") from error

    async def start(self, granules: Mapping[str, Granules]) -> _Cores:
        try:
            cores = await self._process.start(granules, {}, AS_CONFIGURED)
        except Unavailable as error:
            raise PartitionError(f"{self.label} ended while it partitioned the device; the log says why") from error
        self.kept.on_started(granules)
        self._started = True
        return cores

    async def loaded(self) -> None:
        with suppress(Unavailable):  # A process that has ended loads no more; its replacement resumes its tenants by itself.
            await self._process.loaded()

    async def usage(self) -> Report | None:
        """None if the process does not answer: what was used is not reported twice."""
        found = await in_time(self._process.usage())
        return found and found._replace(tenants=[self._known(each) for each in self.tenants.own(found.tenants)])

    def _known(self, counted: TenantUsages) -> TenantUsages:
        """Without what is of too many names."""
        tenant, keep = counted.tenant, self.kept.names.keep
        usages = [each for each in counted.usages if all(keep(tenant, name) for name in (each.model, *each.borrowed))]
        return TenantUsages(tenant, usages)

    async def probe(self, seconds: float) -> dict[str, Placement]:
        return await self._process.probe(seconds)

    async def strain(self, tenant: str, kind: Strain, seconds: float) -> Strained:
        return await self._process.strain(tenant, kind, seconds)

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        """Cancel a tenant's ticket, if it can be: a process that does not read is sent no more than it may have tickets."""
        if self._calls.channel and self._calls.channel.unread < _MOST_UNREAD:
            self._device.cancel(tenant, slot, serial)

    def stop_loading(self) -> None:
        self._process.stop_loading()

    def abandon(self, reason: str) -> None:
        self._process.abandon(reason)

    def set_affinity(self, cores: frozenset[int], builds: frozenset[int], starting: frozenset[int]) -> None:
        """Restrict the process, and the children that build models, to these of the host's cores. While the server starts these
        children run on `starting` too; a process that replaces this one starts beside tenants that are served.
        """
        self.kept.affinity = cores, builds
        self._device.set_affinity(cores, builds, starting)

    async def close(self) -> None:
        if self._resuming:
            self._resuming.cancel()
        with suppress(Unavailable):
            await self._process.close()

    async def _resume(self, channel: Channel, steps: Sequence[float]) -> None:
        """Follow a process that replaces another, and serves its tenants, until the same models are loaded.

        `steps` are when the last one ended, and when this one was there, had the device, and had its partitions.
        """
        try:
            await proxy(ToRuntime, channel).loaded()
        except (RequestError, EngineError, PartitionError) as error:
            if channel.closed.is_set():  # It is replaced as well.
                return
            log.warning("not as before in %s: %s", self.label, error)
        await self.tenants.forget_models(self._not_found_again)
        while late := self.kept.lists.late():  # They were changed while it loaded.
            try:
                await proxy(Models, channel).use(late)
            except (RequestError, EngineError, PartitionError) as error:
                if channel.closed.is_set():
                    return
                log.warning("not all models may be as configured in %s: %s", self.label, error)
        took = [later - earlier for earlier, later in pairwise((*steps, monotonic()))]
        parts = "%.2f to start, %.2f for the device, %.2f for partitions, %.2f for models"
        text = f"%s serves again: %s; %.2f s after the last one ended ({parts})"
        log.info(text, self.label, ", ".join(self.frontends) or "no tenant", sum(took), *took)
        self.tenants.resume()
        if self.kept.wide or self.kept.fences:
            with suppress(RequestError):
                await self.placements.plan(self.kept.wide, self.kept.fences)
        if self.kept.ready:  # Not waited for: connections wait for the end of this.
            send(proxy(Placements, channel).hold(self.kept.ready))

    def _not_found_again(self, tenant: str, name: str) -> list[IndexEntry]:
        """The problem of a model that only the process before had published; none if the tenant may not call it any more."""
        problem = IndexEntry(name, "", "UNAVAILABLE", "no longer in the repository when its device was started again")
        return [problem] if self.kept.lists.allows(tenant, name) else []


async def _opened(process: ToRuntime, limit: float | None) -> DeviceInfo:
    try:
        async with asyncio.timeout(limit):
            return await process.open()
    except TimeoutError as error:
        raise DeviceUnavailable(f"it did not open its device within {limit:g} s") from error
