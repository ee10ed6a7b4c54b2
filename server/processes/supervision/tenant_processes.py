"""Starts and ends the processes of tenants that come and go while others are served; see `TenantHost`.

On cores of this host a tenant's own process has its device side as well. On a GPU the tenant is adopted by the device process,
as one is that moves there from another device while it is served: its HTTP process, queue and memory stay.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from partitions import PartitionError
from partitions.plan import Granules

from ...config.schema import Config
from ...config.tables import ConfigError
from ...config.tenant import TenantConfig
from ...control.device_runtime import Arrival, DeviceRuntime
from ...errors import Conflict, Unavailable
from ...link import ring as links
from ...link.messages import load_of
from ...tenants.catalog import ModelVersion
from ...tenants.frontend import State
from ..remote.device_tenants import Coming
from ..remote.remote_frontend import Publication, RemoteFrontend, open_remote
from ..remote.remote_runtime import OPEN_LIMIT, RemoteRuntime
from . import listen
from .affinity import count
from .listen import CannotListen
from .supervised import HostedRuntime, SupervisedDevice
from .supervised_devices import SupervisedDevices
from .supervised_http import SupervisedHttp

log = logging.getLogger("greenlane.processes")


@dataclass(slots=True)
class TenantSides:
    """A tenant's HTTP side, and the device side that it has now. `link` is held while the link between them is replaced."""

    frontend: RemoteFrontend
    runtime: RemoteRuntime
    link: asyncio.Lock = field(default_factory=asyncio.Lock)

    def serve_from(self, runtime: RemoteRuntime) -> None:
        """The tenant has this device side from now on."""
        self.runtime = runtime
        self.frontend.open(runtime)


class TenantTransfers:
    """Belongs to the supervisor's event loop. `tenants` are those that are served, by name; `find` and `leave` are those of
    `DeviceHomes`. `config` returns what is served now.

    1. The new device process makes a partition, page-locks the tenant's memory, and loads its models; the old one serves.
    2. The HTTP process gets a new link, once what is in flight has ended; what it launches from then on waits in that link.
    3. The old device process frees the tenant, and the new one serves the new link, so the waiting inferences run.
    4. The new models are published. Requests that were queued before name the old ones, so both names are known until then.

    A tenant's `link` is held from 2 on. Whoever replaces its link takes it too.
    """

    def __init__(
        self,
        tenants: Mapping[str, TenantSides],
        find: Callable[[str, str], Awaitable[RemoteRuntime]],
        leave: Callable[[RemoteRuntime], Awaitable[None]],
        config: Callable[[], Config],
    ) -> None:
        self._tenants = tenants
        self._find = find
        self._leave = leave
        self._config = config

    async def transfer(self, tenant: str, source: DeviceRuntime, device: str, granules: Granules) -> DeviceRuntime:
        """See `Controller.transfer`. After an error the tenant is served as before."""
        assert isinstance(source, RemoteRuntime)
        try:
            target = await self._find(device, tenant)
        except (OSError, EOFError, PartitionError) as error:
            raise Unavailable(f"tenant {tenant}: no process of device {device} can be started: {error}{_UNCHANGED}") from error
        try:
            await self._transfer(tenant, source, target, granules)
        except BaseException:
            if self._tenants[tenant].runtime is source:
                await asyncio.shield(self._leave(target))
            raise
        await self._leave(source)
        return target

    async def _transfer(self, tenant: str, source: RemoteRuntime, target: RemoteRuntime, granules: Granules) -> None:
        frontend = self._tenants[tenant].frontend
        unused, coming = links.renew(frontend.descriptors), Coming()
        try:
            beyond = max((load_of(each.key) for each in frontend.served()), default=0)
            changes, lists = source.kept.changes(tenant), source.kept.lists.of(tenant)
            config = self._config().tenants[tenant]
            await target.handover.adopt(tenant, unused, granules, changes, beyond, lists, config=config, http_side=coming)
        finally:
            unused.close()
        try:
            async with self._link_of(tenant):
                keys = _keys(tenant, frontend.served(), coming.published.values())
                await self._switch(tenant, source, target, granules, keys)
        except BaseException:
            if self._tenants[tenant].runtime is source:
                await asyncio.shield(target.handover.release(tenant))
            raise
        for each in coming.published.values():
            if not target.handover.has_adopted(tenant):  # It has ended, and the next one publishes its own.
                return
            await frontend.publish(*each)
        await target.handover.forget_keys(tenant, keys)

    @asynccontextmanager
    async def _link_of(self, tenant: str) -> AsyncIterator[None]:
        """Hold its `link`. Raises Conflict after `max_pause`, as no granules can change hands meanwhile."""
        lock, limit = self._tenants[tenant].link, self._config().server.max_pause
        try:
            async with asyncio.timeout(limit):
                await lock.acquire()
        except TimeoutError:
            why = f"its HTTP process was replaced, and what it had in flight has not ended after {limit:g} s (server.max_pause)"
            raise Conflict(f"tenant {tenant}: {why}{_UNCHANGED}. Try again when it has") from None
        try:
            yield
        finally:
            lock.release()

    async def _switch(
        self, tenant: str, source: RemoteRuntime, target: RemoteRuntime, granules: Granules, keys: Mapping[str, str]
    ) -> None:
        if source.away:
            raise Unavailable(f"tenant {tenant}: {source.label} has ended and is being started again; move it then")
        sides = self._tenants[tenant]
        before, changes = source.handover.leave(tenant)
        try:
            free = await sides.frontend.relink(self._config().server.max_pause)
        except BaseException:
            source.handover.stay(tenant, before)
            raise
        sides.serve_from(target)
        target.handover.join(tenant, sides.frontend, granules, changes, source.kept.lists.of(tenant))
        await source.handover.release(tenant)
        free()
        await target.handover.serve_adopted(tenant, keys)


def _keys(tenant: str, served: Iterable[ModelVersion], models: Iterable[Publication]) -> dict[str, str]:
    """The keys of the models that are served, each with the key of the same version of the same model in `models`.

    Raises Conflict if one of them is missing or has other tensors.
    """
    there = {(each.name, each.version): each for model in models for each in model.served}
    keys: dict[str, str] = {}
    for each in served:
        if (found := there.get((each.name, each.version))) is None:
            reasons = [problem.reason for model in models if model.name == each.name for problem in model.problems]
            why = f": {'; '.join(reasons)}" if reasons else ""
            raise Conflict(
                f"tenant {tenant}: model {each.name} {each.version} cannot be served on that device{why}{_UNCHANGED}"
            )
        if (found.signature, found.functions) != (each.signature, each.functions):
            why = "its file has changed since it was loaded; load it again first"
            raise Conflict(f"tenant {tenant}: model {each.name} {each.version}: {why}{_UNCHANGED}")
        keys[each.key] = found.key
    return keys


_UNCHANGED = "; nothing was changed, and the tenant is served as before"


Make = Callable[[str, TenantConfig], SupervisedDevice]
"""Makes the process of a device for a tenant that comes, without tenants yet; it is not started."""


class DeviceHomes:
    """Which device process serves a tenant that comes. Belongs to the supervisor's event loop.

    `shared` are the runtimes of devices whose tenants share a process, by device. `apart` are the device processes that have
    one tenant each, and `make` makes another one.
    """

    def __init__(
        self, devices: SupervisedDevices, shared: Mapping[str, RemoteRuntime], apart: Collection[SupervisedDevice], make: Make
    ) -> None:
        self.devices = devices
        self._shared = shared
        self._apart = {each.runtime: each for each in apart}
        self._make = make

    def has(self, runtime: RemoteRuntime) -> bool:
        """Whether this is a device process's, and not that of a tenant's own process on cores of the host."""
        return runtime in self._apart or runtime in self._shared.values()

    async def find(self, device: str, tenant: TenantConfig) -> RemoteRuntime:
        """The runtime for a tenant that comes to this device. Starts a process where tenants have their own.

        `leave` it when the tenant has gone, or has not come after all. Raises OSError, EOFError, or as `RemoteRuntime.open`.
        """
        if device in self._shared:
            return self._shared[device]
        each = self._make(device, tenant)
        self._apart[each.runtime] = each
        try:
            await self.devices.begin(each)
            await each.runtime.open(OPEN_LIMIT)
            self._share_cores(each)
            await each.runtime.start({})
        except BaseException:
            await self.leave(each.runtime)
            raise
        return each.runtime

    async def leave(self, runtime: RemoteRuntime) -> None:
        """A tenant has left this runtime: end its process if that was the tenant's own."""
        if each := self._apart.pop(runtime, None):
            await self.devices.end(each)

    def _share_cores(self, each: SupervisedDevice) -> None:
        """Restrict a process that comes to the cores of the others of its device."""
        beside = [one.runtime.kept.affinity for one in self._apart.values() if one.device == each.device]
        if known := [affinity for affinity in beside if affinity]:
            all_cores, builds = (frozenset[int]().union(*cores) for cores in zip(*known, strict=True))
            each.runtime.set_affinity(all_cores, builds, starting=builds)


@dataclass(slots=True)
class _Coming:
    """A tenant that is being prepared."""

    config: Config
    device: str
    granules: Granules
    frontend: RemoteFrontend
    listeners: list[socket.socket] = field(default_factory=list)
    runtime: RemoteRuntime | None = None


class TenantProcesses:
    """Belongs to the supervisor's event loop.

    `tenants` are those that are served, by name, and changed here. `http` has HTTP processes, `homes` those of devices.
    `hosted` are the devices that are cores of this host; `host` makes what starts a process with a device side there.
    `on_state` is called with states of tenants' device sides, and the device's name. `cores` is how many the server may use.
    """

    def __init__(
        self,
        http: SupervisedHttp,
        tenants: dict[str, TenantSides],
        homes: DeviceHomes,
        hosted: Collection[str],
        host: Callable[[RemoteRuntime, str], HostedRuntime],
        on_state: Callable[[Iterable[str], State, str], None],
        cores: int,
    ) -> None:
        self._http = http
        self._tenants = tenants
        self._homes = homes
        self._hosted = hosted
        self._host = host
        self._on_state = on_state
        self._cores = cores
        self._coming: dict[str, _Coming] = {}

    async def prepare(self, config: Config, name: str, device: str, granules: Granules) -> Arrival:
        """As `TenantHost.prepare`."""
        try:
            processes = count(config, self._hosted, self._cores)[name]
            frontend = open_remote(config.tenants[name], linked=device not in self._hosted)
        except ConfigError as error:
            raise Conflict(str(error)) from error
        except OSError as error:
            raise Unavailable(f"there is no memory for its link: {error.strerror}") from error
        coming = self._coming[name] = _Coming(config, device, granules, frontend)
        try:
            if (port := config.tenants[name].port) is not None:
                coming.listeners = listen.bind_for(config.server.host, name, port)
            arrival = await (
                self._start_hosted(name, coming) if device in self._hosted else self._adopt(name, coming, processes)
            )
            if problems := await frontend.problems():
                raise Conflict("; ".join(f"failed to load {each.name!r}: {each.reason}" for each in problems))
            return arrival
        except (OSError, EOFError) as error:
            await asyncio.shield(self.discard(name))
            raise Unavailable(f"its process cannot be started: {error}") from error
        except CannotListen as error:
            await asyncio.shield(self.discard(name))
            raise Conflict(str(error)) from error
        except BaseException:
            await asyncio.shield(self.discard(name))
            raise

    async def discard(self, name: str) -> None:
        """As `TenantHost.discard`."""
        if coming := self._coming.pop(name, None):
            await self._end(name, coming.frontend, coming.runtime if coming.device not in self._hosted else None)
            for listener in coming.listeners:  # Where there is no process yet.
                listener.close()

    async def admit(self, name: str) -> None:
        """As `TenantHost.admit`."""
        coming = self._coming.pop(name)
        runtime, frontend = coming.runtime, coming.frontend
        assert runtime
        self._tenants[name] = TenantSides(frontend, runtime)
        frontend.open(runtime)
        if coming.device not in self._hosted:
            runtime.handover.join(name, frontend, coming.granules, {})
            await runtime.handover.serve_adopted(name, {})
        await self._http.admit(name)

    def leave(self, name: str) -> None:
        """As `TenantHost.leave`."""
        self._http.retire(name)
        if self._homes.has(runtime := self._tenants[name].runtime):
            runtime.handover.leave(name)

    async def end(self, name: str) -> None:
        """As `TenantHost.end`."""
        sides = self._tenants.pop(name)
        await self._end(name, sides.frontend, sides.runtime if self._homes.has(sides.runtime) else None)

    async def _end(self, name: str, frontend: RemoteFrontend, runtime: RemoteRuntime | None) -> None:
        """End a tenant's processes, have its device process free it if there is one, and free its memory: all of it, whatever
        fails, as others get its granules.
        """
        async with AsyncExitStack() as left:  # They are called from the last one up.
            left.callback(frontend.close)
            if runtime:
                left.push_async_callback(self._homes.leave, runtime)
                left.push_async_callback(runtime.handover.release, name)
            left.callback(self._homes.devices.close_page, name)
            await self._http.end(name)

    async def _start_hosted(self, name: str, coming: _Coming) -> Arrival:
        """Start the process that has the tenant's device side."""
        on_state = partial(self._on_state, device=coming.device)  # type: ignore[call-arg]
        side = coming.runtime = RemoteRuntime(f"the process of {name}", {name: coming.frontend}, on_state)
        hosted = self._host(side, coming.device)
        await self._http.begin(coming.config, name, coming.frontend, coming.listeners, hosted)
        await side.open()
        cores = await side.start({name: coming.granules})
        await side.loaded()
        return Arrival(coming.frontend, side, cores)

    async def _adopt(self, name: str, coming: _Coming, processes: int) -> Arrival:
        """Have the process of its device make the tenant ready, and start its HTTP process."""
        self._homes.devices.open_page(name, processes)
        runtime = coming.runtime = await self._homes.find(coming.device, coming.config.tenants[name])
        config, frontend = coming.config.tenants[name], coming.frontend
        await runtime.handover.adopt(name, frontend.descriptors, coming.granules, {}, 0, config=config, http_side=frontend)
        await self._http.begin(coming.config, name, frontend, coming.listeners, count=processes)
        return Arrival(frontend, runtime, {name: None})
