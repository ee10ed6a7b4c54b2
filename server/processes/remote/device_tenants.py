"""The tenants of one device process as the supervisor has them, whose HTTP sides the process calls."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol, TypeVar

from ...link.messages import ModelKey
from ...tenants.catalog import IndexEntry, ModelVersion
from ...tenants.frontend import HttpSide
from .remote_frontend import Publication, RemoteFrontend


class _OfTenant(Protocol):
    @property
    def tenant(self) -> str: ...


_Row = TypeVar("_Row", bound=_OfTenant)


class Coming(HttpSide):
    """In place of a tenant that another device serves still: what is `published`, by model, and holds from `join` on."""

    def __init__(self) -> None:
        self.published: dict[str, Publication] = {}
        self.paged = set[ModelKey]()
        self.suspended = ""

    async def publish(self, name: str, served: list[ModelVersion], problems: list[IndexEntry]) -> bool:
        self.published[name] = Publication(name, served, problems)
        return True

    async def page_out(self, model: ModelKey) -> bool:
        """No request has come to its models here."""
        self.paged.add(model)
        return True

    def page_in(self, model: ModelKey) -> None:
        self.paged.discard(model)

    def suspend(self, reason: str) -> None:
        self.suspended = reason


class Leaving(HttpSide):
    """In place of a tenant that this process still serves, but no replacement of it: it moves to another device, or ends."""

    def __init__(self, frontend: RemoteFrontend) -> None:
        self.frontend = frontend

    async def last_uses(self) -> Mapping[ModelKey, int]:
        return await self.frontend.last_uses()

    async def page_out(self, model: ModelKey) -> bool:
        """Requests that it has accepted may still need the room."""
        return await self.frontend.page_out(model)

    def page_in(self, model: ModelKey) -> None:
        self.frontend.page_in(model)

    def suspend(self, reason: str) -> None:
        self.frontend.suspend(reason)

    def distrust(self, reason: str) -> None:
        self.frontend.distrust(reason)


class DeviceTenants:
    """Belongs to the event loop. `frontends` are those of the tenants that a replacement of the process has too.

    `allows` says whether a tenant may call a model now.
    """

    def __init__(self, frontends: Mapping[str, RemoteFrontend], allows: Callable[[str, str], bool] = lambda *_: True) -> None:
        self.frontends: dict[str, RemoteFrontend] = dict(frontends)
        self.had = set(frontends)
        """Those that the process, or one before it, has or has had."""
        self.away = False
        """Whether the process has ended, and no other one has loaded the same models yet."""
        self._allows = allows
        self._coming: dict[str, HttpSide] = {}
        self._leaving: dict[str, Leaving] = {}

    def __contains__(self, tenant: str) -> bool:
        """Whether the process has this tenant, or makes it ready."""
        return tenant in self.frontends or tenant in self._leaving or tenant in self._coming

    def own(self, rows: Iterable[_Row]) -> list[_Row]:
        """Those of a report. What a process says of tenants that it never had is left out: on cores it is one tenant's own, and
        could write on another tenant's bill.
        """
        return [row for row in rows if row.tenant in self.had]

    def http_side(self, tenant: str) -> HttpSide:
        """What the process calls of this tenant; nothing is done for one that it does not have any more."""
        there: HttpSide | None = self.frontends.get(tenant) or self._leaving.get(tenant) or self._coming.get(tenant)
        return there or HttpSide()

    def fail(self, reason: str) -> None:
        """The process has ended: fail all requests of its tenants with this reason, and new ones, until `serve`."""
        self.away = True
        for tenant, frontend in self.frontends.items():
            frontend.fail_in_flight(reason)
            frontend.allows = partial(self._allows, tenant)
        for each in self._leaving.values():
            each.frontend.fail_in_flight(reason, queued=False)  # The other device serves what waits.

    def serve(self) -> None:
        """Another process has workers: each model of its tenants is served from the moment at which it is published."""
        for frontend in self.frontends.values():
            frontend.serve()

    async def forget_models(self, problem: Callable[[str, str], list[IndexEntry]]) -> None:
        """Serve no model that only the process before had published; `problem` says why, by tenant and name."""
        for tenant, frontend in list(self.frontends.items()):
            for name in list(frontend.lost()):
                await frontend.publish(name, [], problem(tenant, name))

    def resume(self) -> None:
        """The process serves as the one before did."""
        self.away = False
        for frontend in self.frontends.values():
            frontend.allows = None

    def come(self, tenant: str, http_side: HttpSide) -> None:
        """The process makes this tenant ready, and calls this HTTP side until `join` or `release`."""
        self._coming[tenant] = http_side

    def join(self, tenant: str, frontend: RemoteFrontend) -> None:
        """The process has this tenant now, and every replacement of it."""
        if isinstance(coming := self._coming.pop(tenant, None), Coming):
            frontend.change_device(coming.paged, coming.suspended)
        self.frontends[tenant] = frontend
        self.had.add(tenant)
        frontend.allows = partial(self._allows, tenant) if self.away else None

    def leave(self, tenant: str) -> None:
        """The process serves this tenant on, but no replacement of it does."""
        self._leaving[tenant] = Leaving(self.frontends.pop(tenant))

    def left(self, tenant: str) -> RemoteFrontend:
        """The frontend of a tenant that was to leave, and is to `join` again."""
        return self._leaving.pop(tenant).frontend

    def release(self, tenant: str) -> None:
        """The process does not serve this tenant any more."""
        self._coming.pop(tenant, None)
        self._leaving.pop(tenant, None)

    def lose(self, reason: str) -> None:
        """The device is lost, for this reason."""
        for frontend in self.frontends.values():
            frontend.suspend(f"the device is lost: {reason}")
