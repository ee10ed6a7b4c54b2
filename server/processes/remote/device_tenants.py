"""The tenants of one device process as the supervisor has them: what it calls of a tenant's HTTP side is passed on there."""

from collections.abc import Callable, Collection, Mapping, Sequence

from ...tenants.catalog import IndexEntry, ModelVersion
from ..channels.device_protocols import Publication
from .device_frontend import DeviceFrontend


class DeviceTenants:
    """See `FromTenants`. Belongs to the event loop. `frontends` are those of the tenants that a replacement of the process has
    too. `allows` says whether a tenant may call a model now.
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

    def lose(self, reason: str) -> None:
        """The device is lost, for this reason."""
        for frontend in self.frontends.values():
            frontend.suspend(f"the device is lost: {reason}")

    def announce(self, tenant: str, name: str) -> None:
        if frontend := self.frontends.get(tenant):
            frontend.announce(name)

    def listed(self, tenant: str) -> None:
        if frontend := self.frontends.get(tenant):
            frontend.listed()

    async def agree(self, tenant: str, name: str, served: Sequence[ModelVersion]) -> str:
        frontend = self.frontends.get(tenant)
        return await frontend.agree(name, served) if frontend else ""

    def withdraw(self, tenant: str, name: str) -> None:
        if frontend := self.frontends.get(tenant):
            frontend.withdraw(name)

    async def publish(self, tenant: str, publication: Publication) -> bool:
        if (frontend := self.frontends.get(tenant)) is None:  # It has moved to another device.
            return False
        name, served, problems = publication
        if self.away and not self._allows(tenant, name):  # It is sent the new list once all is loaded.
            return True
        self._published.add((tenant, name))
        return await frontend.publish(name, served, problems)

    async def last_uses(self, tenant: str) -> dict[str, int]:
        frontend = self.frontends.get(tenant)
        return dict(await frontend.last_uses()) if frontend else {}

    async def page_out(self, tenant: str, model: str) -> bool:
        frontend = self.frontends.get(tenant)
        return frontend is not None and await frontend.page_out(model)

    def page_in(self, tenant: str, model: str) -> None:
        if frontend := self.frontends.get(tenant):
            frontend.page_in(model)

    def set_cores(self, tenant: str, cores: frozenset[int] | None) -> None:
        if frontend := self.frontends.get(tenant):
            frontend.set_cores(cores)

    def suspend(self, tenant: str, reason: str) -> None:
        self._reasons[tenant] = reason
        if not self._ended and (frontend := self.frontends.get(tenant) or self._leaving.get(tenant)):
            frontend.suspend(reason)

    def distrust(self, tenant: str, reason: str) -> None:
        if frontend := self.frontends.get(tenant) or self._leaving.get(tenant):
            frontend.distrust(reason)
