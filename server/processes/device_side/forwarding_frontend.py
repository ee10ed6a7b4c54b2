"""A tenant's HTTP side as a device process sees it: it calls the supervisor, which passes that on."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from ...errors import Unavailable
from ...link import ring as links
from ...link.messages import ModelKey
from ...link.ring import Descriptors
from ...tenants.catalog import IndexEntry, ModelVersion
from ...tenants.frontend import DeviceSide
from ..channels.calls import proxy
from ..channels.device_protocols import FromTenants, Publication
from ..channels.rpc import Channel


class ForwardingFrontend:
    """See `server.tenants.frontend.Frontend`. Belongs to the event loop of the device process."""

    def __init__(self, tenant: str, descriptors: Descriptors, channel: Channel) -> None:
        self.link = links.attach(descriptors)
        self._descriptors = descriptors
        self._tenant = tenant
        self._supervisor = proxy(FromTenants, channel)
        self.held: dict[str, Publication] | None = None
        """What is not published yet, by model, of a tenant that another device still serves; None for all others."""

    def __repr__(self) -> str:
        return f"<ForwardingFrontend {self._tenant}>"

    def use(self, descriptors: Descriptors) -> Descriptors:
        """Change to a new link to the same memory. Returns the old link's descriptors, to be closed once the worker left it."""
        self.link.completions.free_writer()
        old, self._descriptors = self._descriptors, descriptors
        self.link = links.attach(descriptors, self.link.arena.memory)
        return old

    def open(self, device: DeviceSide) -> None:
        """Nothing to do: cancellations come from the supervisor."""

    def announce(self, name: str) -> None:
        if self.held is None:
            self._supervisor.announce(self._tenant, name)

    def listed(self) -> None:
        if self.held is None:
            self._supervisor.listed(self._tenant)

    async def agree(self, name: str, served: Sequence[ModelVersion]) -> str:
        if self.held is None:
            with suppress(Unavailable):
                return await self._supervisor.agree(self._tenant, name, served)
        return ""

    def withdraw(self, name: str) -> None:
        if self.held is None:
            self._supervisor.withdraw(self._tenant, name)

    async def publish(self, name: str, served: list[ModelVersion], problems: list[IndexEntry]) -> bool:
        publication = Publication(name, served, problems)
        if self.held is not None:
            self.held[name] = publication
            return True
        with suppress(Unavailable):  # Then this process ends as well.
            return await self._supervisor.publish(self._tenant, publication)
        return False

    async def last_uses(self) -> Mapping[ModelKey, int]:
        if self.held is None:
            with suppress(Unavailable):
                return await self._supervisor.last_uses(self._tenant)
        return {}

    async def page_out(self, model: ModelKey) -> bool:
        if self.held is not None:  # No request has come to its models here.
            return True
        with suppress(Unavailable):
            return await self._supervisor.page_out(self._tenant, model)
        return False

    def page_in(self, model: ModelKey) -> None:
        if self.held is None:
            self._supervisor.page_in(self._tenant, model)

    def set_cores(self, cores: frozenset[int] | None) -> None:
        if self.held is None:
            self._supervisor.set_cores(self._tenant, cores)

    def suspend(self, reason: str) -> None:
        if self.held is None:
            self._supervisor.suspend(self._tenant, reason)

    def distrust(self, reason: str) -> None:
        self._supervisor.distrust(self._tenant, reason)

    def close(self) -> None:
        self._descriptors.close()
