"""A tenant's HTTP process as the device process sees it; see `server.tenants.frontend`.

What the HTTP process was sent is kept, to be sent again to its replacement when it dies.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from mmap import PAGESIZE
from typing import Any

from ..config.schema import TenantConfig
from ..errors import Conflict, Unavailable
from ..link import ring as links
from ..link.messages import ModelKey
from ..link.ring import Descriptors, Link
from ..scheduling.lane_statistics import LaneStatistics
from ..scheduling.slot_pool import SlotStatistics
from ..tenants.catalog import Catalog, IndexEntry, ServedModel
from ..tenants.frontend import DeviceSide, Report, State, not_ended
from ..tenants.service import slots
from . import messages
from .descriptors import DescriptorSender
from .messages import CancelTicket, ReportFields
from .rpc import Channel, Malformed

REPORT_TIMEOUT = 1.0
"""Seconds to wait for a report, which is asked of every tenant's process."""
_NO_REPORT = Report((), (), LaneStatistics(0, 0, 0, 0), SlotStatistics(0, 0, 0))


class RemoteFrontend:
    """Belongs to the event loop. `connect` gives it the process at its link's other end, `renew` or `relink` a new link."""

    def __init__(self, config: TenantConfig, descriptors: Descriptors, link: Link) -> None:
        self.link = link
        self.descriptors = descriptors
        self._config = config
        self._device: DeviceSide | None = None
        self._channel: Channel | None = None
        self._sender: DescriptorSender | None = None
        self._connected = asyncio.Event()
        self._catalog = Catalog()
        self._state: State = "starting"
        self._refusing = self._suspended = ""
        self._reported, self._reported_at = _NO_REPORT, time.monotonic()
        self._cores: frozenset[int] | None = None
        self._assigned: frozenset[int] | None = None

    def __repr__(self) -> str:
        return f"<RemoteFrontend {self._config.name}, {self._channel!r}>"

    def handlers(self) -> dict[type[messages.Message], Any]:
        """The handlers of what the process may send."""
        return {CancelTicket: self._cancel}

    async def connect(self, channel: Channel, descriptors: DescriptorSender) -> None:
        """Use this process from now on, and send it what its predecessors were sent."""
        self._channel, self._sender = channel, descriptors
        self._connected.set()
        self._send_affinity()
        published = list(self._repeat(channel))  # All of it is sent before anything else can be.
        with suppress(Unavailable):
            await asyncio.gather(*published)
        if channel is self._channel:
            channel.notify(messages.SetState(self._state))

    def _repeat(self, channel: Channel) -> "Iterator[asyncio.Future[Any]]":
        for name, served, problems in self._catalog.listing():
            if served or problems:
                yield channel.call(messages.Publish.of(name, served, problems), bool)
            else:
                channel.notify(messages.Announce(name))
        for model in self._catalog.paged:
            channel.notify(messages.PageOut(model))
        if self._suspended:
            channel.notify(messages.Suspend(self._suspended))
        if self._refusing:
            channel.notify(messages.Refuse(self._refusing))

    def renew(self) -> Descriptors:
        """Make a new link to the same memory. Returns the old link's descriptors, to be closed once the worker has left it.

        Call it when the process at the other end has ended. Start the next one only when the worker has left the old link:
        otherwise both would write to the same blocks.
        """
        self._channel = self._sender = None
        self._connected.clear()
        return self._use(links.renew(self.descriptors))

    def fail_in_flight(self, reason: str, queued: bool = True) -> None:
        if queued:
            self._suspended = reason
        self._notify(messages.FailInFlight(reason, queued))

    async def relink(self, limit: float = math.inf) -> Callable[[], None]:
        """See `Frontend.relink`. It waits for the process if there is none now, and for its answer longer than `limit`.

        If the process ends meanwhile, the new link is as one by `renew`, and so is what is returned.
        """
        return await asyncio.shield(self._relink(limit))

    async def _relink(self, limit: float) -> Callable[[], None]:
        await self._connected.wait()
        channel, unused = self._channel, links.renew(self.descriptors)
        try:
            if not await self._send_link(unused, limit):
                raise Conflict(not_ended(self._config.name, limit))
            if channel is self._channel:  # Else `renew` was called, and its link is the one in use.
                unused = self._use(unused)
            return unused.close
        except BaseException:
            unused.close()
            raise

    async def _send_link(self, new: Descriptors, limit: float) -> bool:
        """Whether the process uses this link now, or has ended. Raises Failed if it cannot."""
        channel = self._channel
        assert channel
        assert self._sender
        try:
            number = self._sender.send(new[:4])
            return bool(await channel.call(messages.Relink(number, new.slots, new.nbytes, limit), bool))
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

    def open(self, device: DeviceSide) -> None:
        self._device = device

    def set_state(self, state: State) -> None:
        """Send the process the server's state."""
        self._state = state
        self._notify(messages.SetState(state))

    def announce(self, name: str) -> None:
        self._catalog.announce(name)
        self._notify(messages.Announce(name))

    async def publish(self, name: str, served: list[ServedModel], problems: list[IndexEntry]) -> bool:
        self._catalog.put(name, served, problems)
        return bool(await self._call(messages.Publish.of(name, served, problems), bool))

    async def last_uses(self) -> Mapping[ModelKey, int]:
        found: dict[str, int] | None = await self._call(messages.GetLastUses(), dict[str, int])
        return found or {}

    async def page_out(self, model: ModelKey) -> bool:
        """Without a process there is no request."""
        if await self._call(messages.PageOut(model), bool) is False:
            return False
        self._catalog.paged.add(model)
        return True

    def page_in(self, model: ModelKey) -> None:
        self._catalog.paged.discard(model)
        self._notify(messages.PageIn(model))

    def set_cores(self, cores: frozenset[int] | None) -> None:
        self._cores = cores
        self._send_affinity()

    def assign_cores(self, cores: frozenset[int]) -> None:
        """Restrict the process to these of the host's cores, unless the configuration or the partition names others."""
        self._assigned = cores
        self._send_affinity()

    async def report(self) -> Report:
        found = None
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT):
                found = await self._call(messages.GetReport(), ReportFields)
        now = time.monotonic()
        if found is None:  # The process hangs, is busy, or is being replaced.
            return replace(self._reported, age=now - self._reported_at)
        self._reported, self._reported_at = found.report(), now
        return self._reported

    def refuse(self, reason: str) -> None:
        self._refusing = reason
        self._notify(messages.Refuse(reason))

    def suspend(self, reason: str) -> None:
        self._suspended = reason
        self._notify(messages.Suspend(reason))

    async def drained(self) -> None:
        await self._call(messages.WaitUntilIdle())

    def close(self) -> None:
        self.descriptors.close()

    def _send_affinity(self) -> None:
        """Restrict the process to the cores in the configuration, or else of its partition, or else those assigned."""
        cores: Iterable[int] | None = self._config.front_cores or self._cores or self._assigned
        if cores:
            self._notify(messages.SetAffinity(frozenset(cores)))

    def _notify(self, message: messages.Message) -> None:
        if self._channel:
            self._channel.notify(message)

    async def _call(self, message: messages.Message, result: Any = None) -> Any:
        """The answer; None if there is no process, or it dies before it answers."""
        if self._channel:
            with suppress(Unavailable):
                return await self._channel.call(message, result)
        return None

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
