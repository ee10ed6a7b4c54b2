"""A tenant's HTTP side as a device process sees it: each call is a message to the supervisor, which passes it on."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from ...errors import Unavailable
from ...link import ring as links
from ...link.messages import ModelKey
from ...link.ring import Descriptors
from ...tenants.catalog import IndexEntry, ServedModel
from ...tenants.frontend import DeviceSide
from ..channels import device_messages as messages
from ..channels.message_fields import ServedModelFields
from ..channels.rpc import Channel


class ForwardingFrontend:
    """See `server.tenants.frontend.Frontend`. Belongs to the event loop of the device process."""

    def __init__(self, tenant: str, descriptors: Descriptors, channel: Channel) -> None:
        self.link = links.attach(descriptors)
        self._descriptors = descriptors
        self._tenant = tenant
        self._channel = channel
        self.held: dict[str, messages.PublishModel] | None = None
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
            self._channel.notify(messages.AnnounceModel(self._tenant, name))

    def listed(self) -> None:
        if self.held is None:
            self._channel.notify(messages.ModelsListed(self._tenant))

    async def agree(self, name: str, served: Sequence[ServedModel]) -> str:
        if self.held is None:
            message = messages.AgreeOnModel(self._tenant, name, [ServedModelFields.of(each) for each in served])
            with suppress(Unavailable):
                return str(await self._channel.call(message, str))
        return ""

    def withdraw(self, name: str) -> None:
        if self.held is None:
            self._channel.notify(messages.WithdrawModel(self._tenant, name))

    async def publish(self, name: str, served: list[ServedModel], problems: list[IndexEntry]) -> bool:
        message = messages.PublishModel(self._tenant, name, [ServedModelFields.of(each) for each in served], problems)
        if self.held is not None:
            self.held[name] = message
            return True
        with suppress(Unavailable):  # Then this process ends as well.
            return bool(await self._channel.call(message, bool))
        return False

    async def last_uses(self) -> Mapping[ModelKey, int]:
        if self.held is None:
            with suppress(Unavailable):
                return dict(await self._channel.call(messages.GetTenantUses(self._tenant), dict[str, int]))
        return {}

    async def page_out(self, model: ModelKey) -> bool:
        if self.held is not None:  # No request has come to its models here.
            return True
        with suppress(Unavailable):
            return bool(await self._channel.call(messages.PageOutModel(self._tenant, model), bool))
        return False

    def page_in(self, model: ModelKey) -> None:
        if self.held is None:
            self._channel.notify(messages.PageInModel(self._tenant, model))

    def set_cores(self, cores: frozenset[int] | None) -> None:
        if self.held is None:
            self._channel.notify(messages.SetTenantCores(self._tenant, cores))

    def suspend(self, reason: str) -> None:
        if self.held is None:
            self._channel.notify(messages.SuspendTenant(self._tenant, reason))

    def distrust(self, reason: str) -> None:
        self._channel.notify(messages.DistrustTenant(self._tenant, reason))

    def close(self) -> None:
        self._descriptors.close()
