"""A tenant's HTTP process as the supervisor sees it; see `server.tenants.frontend`.

What the HTTP process was sent is kept, to be sent again to its replacement when it dies.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from mmap import PAGESIZE
from typing import Any

from ...config.tenant import TenantConfig
from ...errors import Conflict, Unavailable
from ...link import ring as links
from ...link.messages import ModelKey
from ...link.ring import Descriptors, Link
from ...tenants.catalog import Catalog, IndexEntry, ServedModel
from ...tenants.frontend import DeviceSide, Report, State, not_ended
from ...tenants.service import slots
from ..channels import messages
from ..channels.descriptors import DescriptorSender
from ..channels.message_fields import ReportFields, ServedModelFields
from ..channels.messages import CancelTicket, GetTotals
from ..channels.rpc import Channel, Malformed
from .http_processes import HttpProcesses

log = logging.getLogger("greenlane.processes")


class RemoteFrontend:
    """Belongs to the event loop. `connect` gives it the process at its link's other end, `renew` or `relink` a new link.

    If the tenant has several HTTP processes that one is the lead; `add_helper` gives it each of the others.
    """

    def __init__(self, config: TenantConfig, descriptors: Descriptors, link: Link) -> None:
        self.link = link
        self.descriptors = descriptors
        self._config = config
        self._device: DeviceSide | None = None
        self._processes = HttpProcesses()
        self._catalog = Catalog()
        self._listed = False
        self._state: State = "starting"
        self._progress = ""
        self._refusing = self._suspended = ""
        self._cores: frozenset[int] | None = None
        self._assigned: frozenset[int] | None = None

    def __repr__(self) -> str:
        return f"<RemoteFrontend {self._config.name}, {self._processes.lead!r}>"

    def handlers(self) -> dict[type[messages.Message], Any]:
        """The handlers of what the process may send."""
        return {CancelTicket: self._cancel, **self.handlers_of_helpers()}

    def handlers_of_helpers(self) -> dict[type[messages.Message], Any]:
        """The same for a helper."""
        return {GetTotals: self._totals}

    async def connect(self, channel: Channel, descriptors: DescriptorSender) -> None:
        """Use this process from now on, and send it what its predecessors were sent."""
        self._processes.connect(channel, descriptors)
        await self._catch_up(channel)

    async def add_helper(self, number: int, channel: Channel) -> None:
        """Use this process, the helper of this number, too, and send it what the lead was sent."""
        self._processes.add_helper(number, channel)
        await self._catch_up(channel)

    def remove_helper(self, number: int) -> None:
        """It has ended. What it counted stays in the totals."""
        self._processes.remove_helper(number)

    async def _catch_up(self, channel: Channel) -> None:
        self._send_affinity()
        published = list(self._repeat(channel))  # All of it is sent before anything else can be.
        self._repeat_devices(channel)
        with suppress(Unavailable):
            await asyncio.gather(*published)
        if channel in self._processes.channels:
            channel.notify(messages.SetState(self._state, self._progress))

    def _repeat(self, channel: Channel) -> "Iterator[asyncio.Future[Any]]":
        for name, served, problems in self._catalog.listing():
            if served or problems:
                yield channel.call(self._publication(name, served, problems), bool)
            else:
                channel.notify(messages.Announce(name))
        if self._listed:
            channel.notify(messages.Listed())
        for model in self._catalog.paged:
            channel.notify(messages.PageOut(model))
        if self._suspended:
            channel.notify(messages.Suspend(self._suspended))
        if self._refusing:
            channel.notify(messages.Refuse(self._refusing))

    @property
    def spread(self) -> Mapping[str, Descriptors]:
        """The links to a tenant's devices, if it is on several."""
        return {}

    def renew(self) -> Callable[[], None]:
        """Make a new link to the same memory. Returns what frees the old link, to be called once the worker has left it.

        Call it when the process at the other end has ended. Start the next one only when the worker has left the old link:
        otherwise both would write to the same blocks.
        """
        self._processes.forget()
        return self._use(links.renew(self.descriptors)).close

    def fail_in_flight(self, reason: str, queued: bool = True) -> None:
        if queued:
            self._suspended = reason
        for channel in self._processes.channels:
            if channel is self._processes.lead:
                channel.notify(messages.FailInFlight(reason, queued))
            elif queued:
                channel.notify(messages.Suspend(reason))  # Its requests in flight the lead ends.
        if queued:
            self._catalog.lose()
            self._processes.notify(messages.LoseModels())

    async def relink(self, limit: float = math.inf) -> Callable[[], None]:
        """See `ManagedFrontend.relink`. It waits for the process if there is none now, and for its answer longer than `limit`.

        If the process ends meanwhile, the new link is as one by `renew`, and so is what is returned.
        """
        return await asyncio.shield(self._relink(limit))

    async def _relink(self, limit: float) -> Callable[[], None]:
        await self._processes.connected.wait()
        channel, unused = self._processes.lead, links.renew(self.descriptors)
        try:
            if not await self._send_link(unused, limit):
                raise Conflict(not_ended(self._config.name, limit))
            if channel is self._processes.lead:  # Else `renew` was called, and its link is the one in use.
                unused = self._use(unused)
            return unused.close
        except BaseException:
            unused.close()
            raise

    async def _send_link(self, new: Descriptors, limit: float, device: str = "") -> bool:
        """Whether the process uses this link now, or has ended. Raises Failed if it cannot."""
        channel, sender = self._processes.lead, self._processes.sender
        assert channel
        assert sender
        try:
            number = sender.send(new[:4])
            return bool(await channel.call(messages.Relink(number, new.slots, new.nbytes, limit, device), bool))
        except Unavailable:
            await channel.closed.wait()  # One that takes no descriptors hangs, and is killed soon.
            return True

    def _use(self, new: Descriptors) -> Descriptors:
        """Change links; returns the old one."""
        old, self.descriptors = self.descriptors, new
        self.link = links.attach(new, self.link.arena.memory)
        return old

    def served(self) -> list[ServedModel]:
        """The models that the process was sent last."""
        return self._catalog.served()

    def last_uses_known(self) -> Mapping[str, int]:
        return self._processes.last_uses()

    async def problems(self) -> list[IndexEntry]:
        """The models that cannot be served, with the reasons, as the process has them. Raises Unavailable if it ends."""
        assert self._processes.lead
        found: ReportFields = await self._processes.lead.call(messages.GetReport(), ReportFields)
        return [each for each in found.report().index if each.state == "UNAVAILABLE"]

    def open(self, device: DeviceSide) -> None:
        self._device = device

    def set_state(self, state: State, progress: str = "") -> None:
        """Send the process the server's state, and how far its start is."""
        self._state, self._progress = state, progress
        self._processes.notify(messages.SetState(state, progress))

    def announce(self, name: str) -> None:
        self._catalog.announce(name)
        self._processes.notify(messages.Announce(name))

    def listed(self) -> None:
        self._listed = True
        self._processes.notify(messages.Listed())

    def begin_load(self, name: str) -> None:
        """Nothing to do: no other device loads it."""

    def end_load(self, name: str, error: Exception | None) -> None:
        """As `begin_load`."""

    async def agree(self, name: str, served: Sequence[ServedModel]) -> str:
        """A process that ends meanwhile does not refuse: the next one runs the functions when it is sent the models."""
        if not any(each.functions for each in served):
            return ""
        answers = await self._processes.call(messages.OpenFunctions(name, [ServedModelFields.of(each) for each in served]), str)
        why = next(filter(None, answers), "")
        if why:
            self.withdraw(name)
        return why

    def withdraw(self, name: str) -> None:
        self._processes.notify(messages.CloseFunctions(name))

    async def publish(self, name: str, served: list[ServedModel], problems: list[IndexEntry]) -> bool:
        self._catalog.put(name, served, problems)
        answers = await self._processes.call(self._publication(name, served, problems), bool)
        return bool(answers and answers[0])

    def _publication(self, name: str, served: Sequence[ServedModel], problems: Sequence[IndexEntry]) -> messages.Publish:
        return messages.Publish.of(name, served, problems)

    def _repeat_devices(self, channel: Channel) -> None:
        """Tell a process of devices that do not serve the tenant, if it is on several."""

    async def last_uses(self) -> Mapping[ModelKey, int]:
        latest: dict[str, int] = {}
        for found in await self._processes.call(messages.GetLastUses(), dict[str, int]):
            for model, used in (found or {}).items():
                latest[model] = max(used, latest.get(model, 0))
        return latest

    async def page_out(self, model: ModelKey) -> bool:
        """Without a process there is no request. What a helper has not sent to its lead yet comes after it."""
        if False in (await self._processes.call(messages.PageOut(model), bool))[:1]:
            return False
        self._catalog.paged.add(model)
        return True

    def page_in(self, model: ModelKey) -> None:
        self._catalog.paged.discard(model)
        self._processes.notify(messages.PageIn(model))

    def set_cores(self, cores: frozenset[int] | None) -> None:
        self._cores = cores
        self._send_affinity()

    def assign_cores(self, cores: frozenset[int]) -> None:
        """Restrict the process to these of the host's cores, unless the configuration or the partition names others."""
        self._assigned = cores
        self._send_affinity()

    async def report(self) -> Report:
        return await self._processes.report()

    async def _totals(self, _: GetTotals) -> ReportFields:
        return ReportFields.of(await self.report())

    def refuse(self, reason: str) -> None:
        self._refusing = reason
        self._processes.notify(messages.Refuse(reason))

    def suspend(self, reason: str) -> None:
        self._suspended = reason
        self._processes.notify(messages.Suspend(reason))

    def distrust(self, reason: str) -> None:
        """Close the channel: the supervisor replaces the process then, and gives its replacement a new link."""
        log.error("malformed message in the link of tenant %s; replacing its HTTP process: %s", self._config.name, reason)
        if self._processes.lead:
            self._processes.lead.distrust()

    async def drained(self) -> None:
        await self._processes.call(messages.WaitUntilIdle())

    def close(self) -> None:
        """Free the link, and the tenant's memory once no process uses it."""
        self.descriptors.close()
        del self.link  # It maps that memory.

    def _send_affinity(self) -> None:
        """Restrict the process to the cores in the configuration, or else of its partition, or else those assigned."""
        cores: Iterable[int] | None = self._config.front_cores or self._cores or self._assigned
        if cores:
            self._processes.notify(messages.SetAffinity(frozenset(cores)))

    def _cancel(self, message: CancelTicket) -> None:
        if message.slot >= self.descriptors.slots:
            raise Malformed(f"slot {message.slot} of {self.descriptors.slots}")
        if self._device:
            self._device.cancel(self._config.name, message.slot, message.serial)


def open_remote(config: TenantConfig, linked: bool = True) -> RemoteFrontend:
    """A frontend that has a link but no process yet. Its `close` frees the link.

    Not `linked`: the tenant's own process has its device side and their link, so that this one is never used, and tiny.
    """
    descriptors = links.create(slots(config), config.memory if linked else PAGESIZE)
    return RemoteFrontend(config, descriptors, links.attach(descriptors))
