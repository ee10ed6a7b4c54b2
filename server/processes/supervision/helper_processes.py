"""A tenant's helpers as the supervisor has them: started after their lead, replaced when they end, and ended with it."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ...errors import RequestError, Unavailable
from ...link import occupancy
from ...link import ring as links
from ...tenants import relay
from ..channels.calls import proxy
from ..channels.http_protocols import ToHttp, ToTenant
from ..children import spawn
from .restarts import Restarts
from .supervised import SupervisedProcess
from .supervised_dispatcher import SupervisedDispatcher

log = logging.getLogger("greenlane.processes")


Start = Callable[[SupervisedProcess, Any, Any], Awaitable[None]]
"""Starts a process, given its link and the socket for its cancellations."""


class HelperProcesses:
    """Those of one lead. Belongs to the event loop. `start` starts a process; `ended` is called with one that has ended."""

    def __init__(
        self,
        lead: SupervisedProcess,
        start: Start,
        ended: Callable[[SupervisedProcess], None],
        dispatcher: SupervisedDispatcher,
        restarts: Restarts,
    ) -> None:
        self._lead = lead
        self._start_process = start
        self._ended = ended
        self._dispatcher = dispatcher
        self._restarts = restarts
        self._keeping: list[asyncio.Task[None]] = []

    def prepare(self, nbytes: int) -> None:
        """Before a lead starts: create the page that its processes share, on which all of the tenant's memory is free."""
        self.close()
        self._lead.occupancy = occupancy.create(nbytes)

    async def start(self) -> list["asyncio.Task[None]"]:
        """Start them, as their lead has started; returns the tasks that keep them. Each was tried once when this returns.

        If this is cancelled, none is kept.
        """
        tried = [asyncio.Event() for _ in self._lead.helpers]
        pairs = zip(self._lead.helpers, tried, strict=True)
        self._keeping = [asyncio.create_task(self._keep(each, event)) for each, event in pairs]
        try:
            for event in tried:
                await event.wait()
        except asyncio.CancelledError:
            for task in self._keeping:
                task.cancel()
            await asyncio.gather(*self._keeping, return_exceptions=True)
            raise
        return self._keeping

    async def end(self) -> None:
        """The lead has ended: end them, and wait until they are gone."""
        for task in self._keeping:
            task.cancel()
        for each in self._lead.helpers:
            self._dispatcher.withdraw(each)
            if each.process:
                spawn.kill(each.process)
        for each in self._lead.helpers:
            if each.process:
                await asyncio.to_thread(each.process.join)

    def close(self) -> None:
        """Close the page."""
        if self._lead.occupancy is not None:
            os.close(self._lead.occupancy)
            self._lead.occupancy = None

    async def _keep(self, each: SupervisedProcess, tried: asyncio.Event) -> None:
        """Start this one, and again whenever it ends, until the server closes or the lead ends."""
        frontend = self._lead.frontend
        assert frontend
        while not self._restarts.closing.is_set():
            try:
                await self._restarts.retry(lambda: self._start(each))
            except Unavailable:
                return  # The lead has ended; all of them are started again with the next one.
            finally:
                tried.set()
            await each.channel.closed.wait()
            if self._restarts.closing.is_set() or each.retired:
                return
            self._dispatcher.withdraw(each)
            frontend.remove_helper(each.number)
            await self._restarts.wait_for_end(each.process, each.label, each.backoff, partial(self._ended, each))

    async def _start(self, each: SupervisedProcess) -> None:
        """Raises OSError or EOFError, and Unavailable once the lead has ended."""
        lead = self._lead
        assert lead.frontend
        assert lead.descriptors
        link = links.renew(lead.frontend.descriptors)
        ours, theirs = relay.sockets()
        try:
            sent = lead.descriptors.send_link(link, ours.fileno())
            await proxy(ToTenant, lead.channel).add_helper(each.number, sent)
            await self._start_process(each, spawn.inherited(link), theirs)
        except RequestError as error:
            if lead.channel.closed.is_set():
                raise Unavailable(f"{lead.label} has ended") from error
            raise OSError(f"{lead.label} takes no helper: {error}") from error
        finally:
            link.close()
            ours.close()
            theirs.close()
        await lead.frontend.add_helper(each.number, each.channel)
        each.takes_connections = True
        self._dispatcher.announce(each)
        if self._restarts.closing.is_set():
            proxy(ToHttp, each.channel).exit()
