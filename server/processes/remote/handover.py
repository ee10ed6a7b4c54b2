"""Tenants that come to a device process or leave it while it serves, new links of those that stay, and all activity pages."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress

from partitions.plan import Granules

from ...config.tenant import TenantConfig
from ...errors import RequestError, Unavailable
from ...link.ring import Descriptors
from ...tenants.frontend import HttpSide
from ..channels.calls import proxy, send
from ..channels.descriptors import MOST
from ..channels.device_protocols import ToDeviceProcess
from ..channels.rpc import Channel
from .device_tenants import DeviceTenants
from .kept_state import Changes, KeptState
from .remote_device import DeviceCalls
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
        config: TenantConfig | None = None,
        *,
        http_side: HttpSide,
    ) -> None:
        """Make a tenant of another device ready beside the tenants of this one, on a link to its memory that is not in use.

        `models` is its list of models if that was changed since the start, and `config` is set for one that the process does
        not know. Until `join` it calls `http_side`, where its models' keys have numbers above `beyond`. Raises as `start` does,
        and Unavailable; nothing is left of it then.
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
        self,
        tenant: str,
        frontend: RemoteFrontend,
        granules: Granules,
        changes: Changes,
        models: list[str] | None = None,
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
        """Free everything that the process has of a tenant that it does not serve any more."""
        self._tenants.release(tenant)
        self._kept.release(tenant)
        self._adopted.pop(tenant, None)
        with suppress(Unavailable):
            await self._process.release(tenant)

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
