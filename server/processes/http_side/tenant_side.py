"""The tenant of an HTTP process, and what the supervisor sends of it: its models, its links, its helpers, its end."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from ...link import ring as links
from ...link.occupancy import LEAD, Occupancy
from ...link.ring import Descriptors
from ...scheduling.pending import Canceller
from ...tenants import publishing
from ...tenants.lending import lend
from ...tenants.relay import Cancellations, Relay
from ...tenants.service import Tenant, last_uses, open_tenant, page_out, report
from ..channels import messages
from ..channels.descriptors import DescriptorReceiver
from ..channels.message_fields import ReportFields
from ..children.process_arguments import ProcessArguments
from .spread_links import SpreadLinks


class TenantSide:
    """Belongs to the event loop. Without a `tenant`, as in the shared HTTP process, nothing has an effect.

    `occupancy` is set if the tenant has several HTTP processes. `spawn` runs a task.
    """

    def __init__(self, arguments: ProcessArguments, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self.tenant: Tenant | None = None
        self.occupancy: Occupancy | None = None
        self._arguments = arguments
        self._spawn = spawn
        self._descriptors = DescriptorReceiver(arguments.descriptors)
        self._link = arguments.link
        self._spread: SpreadLinks | None = None
        self._relays: dict[int, Relay] = {}

    def __repr__(self) -> str:
        return f"<TenantSide of {self._arguments.name}>"

    def handlers(self) -> dict[type[messages.Message], Callable[[Any], Any]]:
        """The handlers of the supervisor's messages; `server.tenants.frontend` describes most of them."""
        return {
            messages.Announce: self._announce,
            messages.Listed: self._on_listed,
            messages.Publish: self._publish,
            messages.OpenFunctions: self._open_functions,
            messages.CloseFunctions: self._close_functions,
            messages.GetLastUses: self._last_uses,
            messages.PageOut: self._page_out,
            messages.PageIn: self._page_in,
            messages.Refuse: self._refuse,
            messages.Suspend: self._suspend,
            messages.FailInFlight: self._fail_in_flight,
            messages.LoseModels: self._lose_models,
            messages.Relink: self._relink,
            messages.AddHelper: self._add_helper,
            messages.GetReport: self._report,
            messages.WaitUntilIdle: self._wait_until_idle,
        }

    def open(self, canceller: Canceller, hosted: Tenant | None) -> None:
        """Open the tenant on its link, or on its links to several devices; `hosted` is one that is open in this process.

        `canceller` is asked to cancel tickets, in a helper the lead.
        """
        arguments = self._arguments
        if arguments.occupancy is not None:
            self.occupancy = Occupancy(arguments.occupancy, arguments.number)
        if arguments.to_lead:
            canceller = Cancellations(arguments.to_lead)
        if arguments.spread:
            config, self._spread = arguments.config.tenants[arguments.name], SpreadLinks(arguments.spread)
            spread = self._spread.spread
            self.tenant = self._spread.tenant = open_tenant(config, spread.link, canceller, self.occupancy, spread)
        elif arguments.link:
            config = arguments.config.tenants[arguments.name]
            self.tenant = open_tenant(config, links.attach(arguments.link), canceller, self.occupancy)
        if self.tenant:
            self.tenant.lane.open(asyncio.get_running_loop())
        else:
            self.tenant = hosted
        if self.tenant and (page := arguments.pages.get(self.tenant.name)) is not None:
            lend(self.tenant, arguments.config.tenants, page, arguments.number)

    async def relays_ended(self) -> None:
        """Wait until all helpers have ended."""
        for each in self._relays.values():
            await each.ended.wait()

    def _announce(self, message: messages.Announce) -> None:
        if self.tenant:
            self.tenant.catalog.announce(message.name)

    def _on_listed(self, _: messages.Listed) -> None:
        if self.tenant:
            self.tenant.catalog.expected = None

    async def _publish(self, message: messages.Publish) -> bool:
        if self._spread:
            await self._spread.publish(message)
        elif self.tenant:
            served = [each.served() for each in message.served]
            if self._arguments.number != LEAD:  # The lead batches, and has the models' own queues.
                served = [replace(each, batching=None, queues=None) for each in served]
            await publishing.publish(self.tenant, message.name, served, message.problems)
        return True

    async def _open_functions(self, message: messages.OpenFunctions) -> str:
        served = [each.served() for each in message.served]
        return await publishing.agree(self.tenant, message.name, served) if self.tenant else ""

    def _close_functions(self, message: messages.CloseFunctions) -> None:
        if self.tenant:
            publishing.withdraw(self.tenant, message.name)

    def _last_uses(self, _: messages.GetLastUses) -> dict[str, int]:
        return last_uses(self.tenant) if self.tenant else {}

    def _page_out(self, message: messages.PageOut) -> bool:
        return self.tenant is not None and page_out(self.tenant, message.model)

    def _page_in(self, message: messages.PageIn) -> None:
        if self.tenant:
            self.tenant.catalog.paged.discard(message.model)

    def _refuse(self, message: messages.Refuse) -> None:
        if self.tenant:
            self.tenant.refuse(message.reason)

    def _suspend(self, message: messages.Suspend) -> None:
        if self._spread and message.device:
            self._spread.suspend(message.device, message.reason)
        elif self.tenant:
            self.tenant.suspend(message.reason)

    def _fail_in_flight(self, message: messages.FailInFlight) -> None:
        if self._spread and message.device:
            self._spread.fail_in_flight(message.device, message.reason)
        elif self.tenant:
            self.tenant.fail_in_flight(message.reason, message.queued)

    def _lose_models(self, _: messages.LoseModels) -> None:
        if self.tenant:
            self.tenant.catalog.lose()

    async def _relink(self, message: messages.Relink) -> bool:
        assert self.tenant, "only tenants have links"
        arena, memory, tickets, completions = self._descriptors.take(message.number, 4)
        unused = Descriptors(arena, memory, tickets, completions, message.slots, message.nbytes)
        try:
            if self._spread:
                unused = self._spread.relink(message.device, unused)
                return True
            lane = self.tenant.lane
            relinked = await lane.relink(links.attach(unused, lane.slots.memory), message.limit)
            if relinked and self._link:
                unused, self._link = self._link, unused
            return relinked
        finally:
            unused.close()

    async def _add_helper(self, message: messages.AddHelper) -> bool:
        assert self.tenant, "only tenants have helpers"
        assert self.occupancy
        *of_link, cancellations = self._descriptors.take(message.descriptors, 5)
        arena, memory, tickets, completions = of_link
        descriptors = Descriptors(arena, memory, tickets, completions, message.slots, message.nbytes)
        end, lane = socket.socket(fileno=cancellations), self.tenant.lane
        if before := self._relays.get(message.number):
            await before.ended.wait()
        link = links.attach(descriptors, lane.slots.memory)
        relay = self._relays[message.number] = Relay(message.number, lane, self.tenant.catalog, link, end, self.occupancy)
        relay.open(asyncio.get_running_loop())
        self._spawn(self._close_link(relay, descriptors))
        return True

    async def _close_link(self, relay: Relay, descriptors: Descriptors) -> None:
        """Close a helper's link when that has ended."""
        await relay.ended.wait()
        descriptors.close()

    def _report(self, _: messages.GetReport) -> ReportFields:
        assert self.tenant, "only tenants are asked for reports"
        return ReportFields.of(report(self.tenant))

    async def _wait_until_idle(self, _: messages.WaitUntilIdle) -> None:
        if self.tenant:
            await self.tenant.lane.drained()
