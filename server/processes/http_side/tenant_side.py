"""The tenant of an HTTP process, and what the supervisor calls of it: its models, its links, its helpers, its end."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from ...link import ring as links
from ...link.occupancy import LEAD, Occupancy
from ...link.ring import Descriptors
from ...scheduling.pending import Canceller
from ...tenants import publishing
from ...tenants.catalog import IndexEntry, ModelVersion
from ...tenants.local_frontend import LocalTenant
from ...tenants.relay import Cancellations, Relay
from ...tenants.service import Tenant, open_tenant
from ..channels.descriptors import DescriptorReceiver, SentLink
from ..channels.http_protocols import Wanted
from ..children.process_setup import ProcessArguments


class TenantSide(LocalTenant):
    """See `ToTenant`. Belongs to the event loop. `open` sets `tenant`, but not in the shared HTTP process.

    `occupancy` is set if the tenant has several HTTP processes. `spawn` runs a task.
    """

    def __init__(self, arguments: ProcessArguments, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self.occupancy: Occupancy | None = None
        self._arguments = arguments
        self._spawn = spawn
        self._descriptors = DescriptorReceiver(arguments.descriptors)
        self._link = arguments.link
        self._relays: dict[int, Relay] = {}

    def open(self, canceller: Canceller, hosted: Tenant | None) -> Tenant | None:
        """Open the tenant, if there is one, on its link; `hosted` is open in this process.

        `canceller` is asked to cancel tickets, in a helper the lead.
        """
        arguments, tenant = self._arguments, hosted
        if arguments.occupancy is not None:
            self.occupancy = Occupancy(arguments.occupancy, arguments.number)
        if arguments.to_lead:
            canceller = Cancellations(arguments.to_lead)
        if arguments.link:
            config = arguments.config.tenants[arguments.name]
            tenant = open_tenant(config, links.attach(arguments.link), canceller, self.occupancy)
        if tenant is None:
            return None
        self.tenant = tenant
        if tenant is not hosted:
            tenant.lane.open(asyncio.get_running_loop())
        if (page := arguments.pages.get(tenant.name)) is not None:
            tenant.use_page(arguments.config.tenants, page, arguments.number)
        return tenant

    async def relays_ended(self) -> None:
        """Wait until all helpers have ended."""
        for each in self._relays.values():
            await each.ended.wait()

    async def publish(self, name: str, served: list[ModelVersion], problems: list[IndexEntry]) -> bool:
        if self._arguments.number != LEAD:  # The lead batches, and has the models' own queues.
            served = [replace(each, batching=None, queues=None) for each in served]
        await publishing.publish(self.tenant, name, served, problems)
        return True

    async def agree(self, name: str, served: Sequence[ModelVersion]) -> str:
        return await publishing.agree(self.tenant, name, served)

    def follow(self, before: Wanted, wanted: Wanted) -> None:
        """Be as is wanted now, and not as was wanted before."""
        if wanted.listed:
            self.listed()
        if wanted.refused != before.refused:
            self.refuse(wanted.refused)
        if wanted.suspended != before.suspended:
            self.tenant.suspend(wanted.suspended)

    def fail_in_flight(self, reason: str, queued: bool) -> None:
        if self._arguments.number == LEAD:  # It ends those of helpers as well.
            self.tenant.fail_in_flight(reason, queued)
        if queued:
            self.tenant.catalog.lose()

    async def relink(self, link: SentLink, limit: float) -> bool:
        unused = self._descriptors.take_link(link)
        try:
            lane = self.tenant.lane
            relinked = await lane.relink(links.attach(unused, lane.slots.memory), limit)
            if relinked and self._link:
                unused, self._link = self._link, unused
            return relinked
        finally:
            unused.close()

    async def add_helper(self, number: int, link: SentLink) -> None:
        assert self.occupancy
        arena, memory, tickets, completions, cancellations = self._descriptors.take(link.number, 5)
        descriptors = Descriptors(arena, memory, tickets, completions, link.slots, link.nbytes)
        end, lane = socket.socket(fileno=cancellations), self.tenant.lane
        if before := self._relays.get(number):
            await before.ended.wait()
        attached = links.attach(descriptors, lane.slots.memory)
        relay = self._relays[number] = Relay(number, lane, self.tenant.catalog, attached, end, self.occupancy)
        relay.open(asyncio.get_running_loop())
        self._spawn(self._close_link(relay, descriptors))

    async def _close_link(self, relay: Relay, descriptors: Descriptors) -> None:
        """Close a helper's link when that has ended."""
        await relay.ended.wait()
        descriptors.close()
