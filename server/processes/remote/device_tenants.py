"""The tenants of one device process as the supervisor has them: what the process sends of a tenant goes to its HTTP side."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...tenants.catalog import IndexEntry
from ..channels import device_messages as messages
from ..channels.messages import Message
from .device_frontend import DeviceFrontend


class DeviceTenants:
    """Belongs to the event loop. `frontends` are those of the tenants that a replacement of the process has too.

    `allows` says whether a tenant may call a model now.
    """

    def __init__(self, frontends: Mapping[str, DeviceFrontend], allows: Callable[[str, str], bool] = lambda *_: True) -> None:
        self.frontends: dict[str, DeviceFrontend] = dict(frontends)
        self.away = False
        """Whether the process has ended, and no other one has loaded the same models yet."""
        self._allows = allows
        self._ended = False
        """Whether it has ended, and no other one has workers yet."""
        self._leaving: dict[str, DeviceFrontend] = {}
        """Tenants that this process still serves, but no replacement of it: they are moving to another device."""
        self._reasons: dict[str, str] = {}
        """Why the process itself has its tenants suspended."""
        self._published: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        return f"<DeviceTenants {', '.join(self.frontends) or 'none'}>"

    def handlers(self) -> dict[type[Message], Callable[[Any], Any]]:
        """The handlers of what the process sends of a tenant."""
        return {
            messages.ReportDeviceLost: lambda message: self._suspend_all(f"the device is lost: {message.reason}"),
            messages.AnnounceModel: self._announce,
            messages.ModelsListed: self._listed,
            messages.AgreeOnModel: self._agree,
            messages.WithdrawModel: self._withdraw,
            messages.PublishModel: self._publish,
            messages.GetTenantUses: self._last_uses,
            messages.PageOutModel: self._page_out,
            messages.PageInModel: self._page_in,
            messages.SetTenantCores: self._set_cores,
            messages.SuspendTenant: self._suspend,
            messages.DistrustTenant: self._distrust,
        }

    def fail(self, reason: str) -> None:
        """The process has ended: fail all requests of its tenants with this reason, and new ones, until `serve`."""
        self.away = self._ended = True
        self._reasons.clear()
        self._published.clear()
        for frontend in self.frontends.values():
            frontend.fail_in_flight(reason)
        for frontend in self._leaving.values():
            frontend.fail_in_flight(reason, queued=False)  # The other device serves what waits.

    def serve(self) -> None:
        """Another process has workers: each model of its tenants is served from the moment at which it is published."""
        self._ended = False
        for tenant, frontend in self.frontends.items():
            frontend.suspend(self._reasons.get(tenant, ""))

    async def forget_models(self, problem: Callable[[str, str], Collection[IndexEntry]]) -> None:
        """Serve no model that only the process before had published; `problem` says why, by tenant and name."""
        for tenant, frontend in list(self.frontends.items()):
            for name in {each.name for each in frontend.served() if (tenant, each.name) not in self._published}:
                await frontend.publish(name, [], list(problem(tenant, name)))

    def resume(self) -> None:
        """The process serves as the one before did."""
        self.away = False

    def leave(self, tenant: str) -> None:
        """The process serves this tenant on, but no replacement of it does."""
        self._leaving[tenant] = self.frontends.pop(tenant)

    def stay(self, tenant: str) -> None:
        """Undo `leave`."""
        self.frontends[tenant] = self._leaving.pop(tenant)

    def release(self, tenant: str) -> None:
        """The process does not serve this tenant any more."""
        self._leaving.pop(tenant, None)
        self._reasons.pop(tenant, None)

    def _suspend_all(self, reason: str) -> None:
        for frontend in self.frontends.values():
            frontend.suspend(reason)

    def _announce(self, message: messages.AnnounceModel) -> None:
        if frontend := self.frontends.get(message.tenant):
            frontend.announce(message.name)

    def _listed(self, message: messages.ModelsListed) -> None:
        if frontend := self.frontends.get(message.tenant):
            frontend.listed()

    async def _agree(self, message: messages.AgreeOnModel) -> str:
        frontend = self.frontends.get(message.tenant)
        return await frontend.agree(message.name, [each.served() for each in message.served]) if frontend else ""

    def _withdraw(self, message: messages.WithdrawModel) -> None:
        if frontend := self.frontends.get(message.tenant):
            frontend.withdraw(message.name)

    async def _publish(self, message: messages.PublishModel) -> bool:
        if (frontend := self.frontends.get(message.tenant)) is None:  # It has moved to another device.
            return False
        if self.away and not self._allows(message.tenant, message.name):  # It is sent the new list once all is loaded.
            return True
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

    def _suspend(self, message: messages.SuspendTenant) -> None:
        self._reasons[message.tenant] = message.reason
        if not self._ended and (frontend := self.frontends.get(message.tenant) or self._leaving.get(message.tenant)):
            frontend.suspend(message.reason)

    def _distrust(self, message: messages.DistrustTenant) -> None:
        if frontend := self.frontends.get(message.tenant) or self._leaving.get(message.tenant):
            frontend.distrust(message.reason)
