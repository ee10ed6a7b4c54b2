"""A tenant's HTTP side in a process of its own, as the device side sees it; see `server.tenants.frontend.Desk`.

What was said to the process is kept, to be said again to the one that takes its place when it dies.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..config.schema import TenantConfig
from ..errors import Unavailable
from ..link import ring as links
from ..link.ring import Descriptors, Link
from ..scheduling.lane import LaneStatistics
from ..scheduling.slot_pool import SlotStatistics
from ..tenants.catalog import Catalog, Entry, Served
from ..tenants.frontend import DeviceSide, Report, State
from ..tenants.service import slots
from .rpc import Channel

PATIENCE = 1.0
"""Seconds that a report may take; who asks for it asks every tenant's process."""
_NOTHING = Report((), (), LaneStatistics(0, 0, 0, 0), SlotStatistics(0, 0, 0))


class RemoteFrontend:
    """Belongs to the event loop. `renew` gives it a link, `connect` a process that has the other end of it."""

    def __init__(self, config: TenantConfig, descriptors: Descriptors, link: Link) -> None:
        self.link = link
        self.descriptors = descriptors
        self._config = config
        self._device: DeviceSide | None = None
        self._channel: Channel | None = None
        self._catalog = Catalog()
        self._state: State = "starting"
        self._refusing = self._suspended = ""
        self._reported, self._reported_at = _NOTHING, time.monotonic()
        self._cores: frozenset[int] | None = None
        self._assigned: frozenset[int] | None = None

    def __repr__(self) -> str:
        return f"<RemoteFrontend {self._config.name}, {self._channel!r}>"

    def handlers(self) -> dict[str, Any]:
        """What the process may say."""
        return {"cancel": self._cancel}

    async def connect(self, channel: Channel) -> None:
        """Speak to this process from now on, and tell it what those before were told."""
        self._channel = channel
        self._place()
        published = list(self._repeat(channel))  # All is said before anything else can be.
        with suppress(Unavailable):
            await asyncio.gather(*published)
        if channel is self._channel:
            channel.tell("become", self._state)

    def _repeat(self, channel: Channel) -> "Iterator[asyncio.Future[Any]]":
        for name, served, problems in self._catalog.listing():
            if served or problems:
                yield channel.ask("publish", name, served, problems)
            else:
                channel.tell("announce", name)
        if self._suspended:
            channel.tell("suspend", self._suspended)
        if self._refusing:
            channel.tell("refuse", self._refusing)

    def renew(self) -> Descriptors:
        """Have a new link to the same memory, and return the old one's descriptors, to be closed when nothing uses it any more.

        The process that had the other end has ended by now, and the next is only started once the worker has left the old
        link: else both would write to the same blocks.
        """
        left, self.descriptors = self.descriptors, links.renew(self.descriptors)
        self.link = links.attach(self.descriptors, self.link.arena.memory)
        self._channel = None
        return left

    def open(self, device: DeviceSide) -> None:
        self._device = device

    def become(self, state: State) -> None:
        """Tell the process the server's state."""
        self._state = state
        self._tell("become", state)

    def announce(self, name: str) -> None:
        self._catalog.announce(name)
        self._tell("announce", name)

    async def publish(self, name: str, served: list[Served], problems: list[Entry]) -> bool:
        self._catalog.put(name, served, problems)
        return bool(await self._ask("publish", name, served, problems))

    def place(self, cores: frozenset[int] | None) -> None:
        self._cores = cores
        self._place()

    def assign(self, cores: frozenset[int]) -> None:
        """Run on these of the host's cores, unless the tenant has some of its own."""
        self._assigned = cores
        self._place()

    async def report(self) -> Report:
        found = None
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                found = await self._ask("report")
        now = time.monotonic()
        if found is None:  # The process hangs, is busy, or another is about to take its place.
            return replace(self._reported, age=now - self._reported_at)
        self._reported, self._reported_at = found, now
        return self._reported

    def refuse(self, reason: str) -> None:
        self._refusing = reason
        self._tell("refuse", reason)

    def suspend(self, reason: str) -> None:
        self._suspended = reason
        self._tell("suspend", reason)

    async def empty(self) -> None:
        await self._ask("empty")

    def close(self) -> None:
        self.descriptors.close()

    def _place(self) -> None:
        """On its own cores if the configuration gives it some, else on those that came with its partition, or were assigned."""
        cores: Iterable[int] | None = self._config.front_cores or self._cores or self._assigned
        if cores:
            self._tell("place", frozenset(cores))

    def _tell(self, name: str, *arguments: Any) -> None:
        if self._channel:
            self._channel.tell(name, *arguments)

    async def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer, or None where there is no process to ask: of one that died nothing is left to wait for."""
        if self._channel:
            with suppress(Unavailable):
                return await self._channel.ask(name, *arguments)
        return None

    def _cancel(self, slot: int, serial: int) -> None:
        if self._device:
            self._device.cancel(self._config.name, slot, serial)


def open_remote(config: TenantConfig) -> RemoteFrontend:
    """A desk without a process; its `close` frees what this takes."""
    descriptors = links.create(slots(config), config.memory)
    return RemoteFrontend(config, descriptors, links.attach(descriptors))
