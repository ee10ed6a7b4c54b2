"""The links of a tenant on several devices, in its HTTP process: what the supervisor says of one device is carried out here."""

from collections.abc import Mapping

from ...link import ring as links
from ...link.messages import ModelKey
from ...link.ring import Descriptors
from ...link.spread import Spread
from ...tenants.catalog import IndexEntry, ModelVersion
from ...tenants.publishing import publish
from ...tenants.service import Tenant
from ..channels.http_protocols import Keys


class SpreadLinks:
    """Belongs to the event loop. `descriptors` are those of the links, by device, and belong to this. Set `tenant` next."""

    tenant: Tenant

    def __init__(self, descriptors: Mapping[str, Descriptors]) -> None:
        self._descriptors = dict(descriptors)
        first, *others = descriptors.items()
        attached = {first[0]: links.attach(first[1])}
        memory = attached[first[0]].arena.memory
        attached |= {name: links.attach(each, memory) for name, each in others}
        self.spread = Spread(attached)
        self._suspended = ""
        self._left: dict[str, list[ModelKey]] = {}
        """Keys of models that were replaced, by name."""

    def __repr__(self) -> str:
        return f"<SpreadLinks {self.spread!r}>"

    async def publish(self, name: str, served: list[ModelVersion], problems: list[IndexEntry], keys: Keys) -> None:
        """As `publishing.publish`. Tickets that name the models that are replaced go where they went.

        They are forgotten when the same model is published the next time: by then no helper has a request for them either.
        """
        self.spread.forget(self._left.pop(name, ()))
        self._left[name] = [each.key for each in self.tenant.catalog.served() if each.name == name and each.key not in keys]
        self.spread.serve(keys)
        await publish(self.tenant, name, served, problems)

    def suspend(self, device: str, reason: str) -> None:
        """This device gets no tickets for now, or some again with "". Requests that run there fail; those that wait do not."""
        if (slots := self.spread.refuse(device, reason)) and reason:
            self.tenant.lane.fail_works(slots, reason)
        self._follow()

    def fail_in_flight(self, device: str, reason: str) -> None:
        """The process of this device has ended. Its requests in flight fail; all others run on the other devices."""
        self.spread.stop(device, reason)
        self._follow()

    def relink(self, device: str, new: Descriptors) -> Descriptors:
        """Use this link to a device whose process has ended. Returns the one before, to be closed."""
        self.spread.replace(device, links.attach(new, self.tenant.lane.slots.memory))
        old, self._descriptors[device] = self._descriptors[device], new
        return old

    def _follow(self) -> None:
        """The tenant is suspended while none of its devices gets tickets."""
        if (reason := self.spread.refusing) != self._suspended:
            self._suspended = reason
            self.tenant.suspend(reason)
