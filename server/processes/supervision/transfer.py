"""Moves a tenant from one device process to another while it is served. Its HTTP process, queue and memory stay."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from partitions.plan import Granules

from ...config.schema import Config
from ...control.device_runtime import DeviceRuntime
from ...errors import Conflict, Unavailable
from ...link import ring as links
from ...link.messages import load_of
from ...tenants.catalog import ModelVersion
from ..remote.device_tenants import Coming
from ..remote.remote_frontend import Publication, RemoteFrontend
from ..remote.remote_runtime import RemoteRuntime

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
    `DeviceHomes`.

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
        config: Config,
    ) -> None:
        self._tenants = tenants
        self._find = find
        self._leave = leave
        self._max_pause = config.server.max_pause

    async def transfer(self, tenant: str, source: DeviceRuntime, device: str, granules: Granules) -> DeviceRuntime:
        """See `Controller.transfer`. After an error the tenant is served as before."""
        assert isinstance(source, RemoteRuntime)
        try:
            target = await self._find(device, tenant)
        except (OSError, EOFError) as error:
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
            await target.handover.adopt(tenant, unused, granules, changes, beyond, lists, http_side=coming)
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
        lock, limit = self._tenants[tenant].link, self._max_pause
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
        self,
        tenant: str,
        source: RemoteRuntime,
        target: RemoteRuntime,
        granules: Granules,
        keys: Mapping[str, str],
    ) -> None:
        if source.away:
            raise Unavailable(f"tenant {tenant}: {source.label} has ended and is being started again; move it then")
        sides = self._tenants[tenant]
        before, changes = source.handover.leave(tenant)
        try:
            free = await sides.frontend.relink(self._max_pause)
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
