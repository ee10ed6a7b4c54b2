"""The device processes as the supervisor has them: started with the links of their tenants, and replaced when they end."""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from partitions import PartitionError

from ...control.together import all_or_none, together
from ...errors import RequestError
from ...host.backoff import Backoff
from ...link import activity
from ..children import spawn
from ..remote.remote_frontend import RemoteFrontend
from .mps_group import MpsGroup
from .restarts import EXIT_TIMEOUT, Restarts, WatchTasks
from .supervised import Current, SupervisedDevice, connect, kill_if_outdated

log = logging.getLogger("greenlane.processes")

CLOSE_LIMIT = 30.0
"""Seconds in which a process without tenants has to close its device: the driver may hang for ever."""


class SupervisedDevices:
    """Belongs to the event loop. `pages` are the descriptors of tenants' activity pages, changed here: every process has all of
    them, as tenants come to it and leave it.

    `relink` is awaited with a tenant's name and frontend while no process has its device: the tenant has a new link then.
    """

    def __init__(
        self,
        devices: Sequence[SupervisedDevice],
        pages: dict[str, int],
        relink: Callable[[str, RemoteFrontend], Awaitable[None]],
        current: Current,
        restarts: Restarts,
    ) -> None:
        self.all = list(devices)
        self._pages = pages
        self._relink = relink
        self._current = current
        self._restarts = restarts
        self._watching = WatchTasks()
        self._kept: set[MpsGroup] = set()
        """Groups that are kept, with processes or without."""
        self._dying: set[BaseProcess] = set()
        """Processes that are about to be killed."""

    def processes(self) -> list[BaseProcess | None]:
        return [each.process for each in self.all]

    async def start(self) -> None:
        """Start all. If one cannot be started, the others are given up, which may wait for the same. Raises its error."""
        await all_or_none(map(self._start, self.all))

    def keep(self) -> None:
        """Start each device process again whenever it ends, until the server closes."""
        for each in self.all:
            self._keep_from_now_on(each)

    def kill_if_stopped(self, now: float, limit: float) -> None:
        """Kill each that has been stopped for longer than so many seconds; it is then replaced. Call it regularly."""
        for each in self.all:
            process = each.process
            if process and process not in self._dying and (seconds := each.stopped_for(now)) >= limit:
                log.error("%s has been stopped for %.1f s (SIGSTOP or a debugger); killing it", each.label, seconds)
                self._kill(each)

    def _kill(self, each: SupervisedDevice) -> None:
        """Have a process leave what it shares with others, which may take seconds, and kill it; it is then replaced."""
        if each.process and each.process not in self._dying:
            self._dying.add(each.process)
            self._watching.start(self._terminate(each.process, each.group))

    async def _terminate(self, process: BaseProcess, group: MpsGroup | None) -> None:
        try:
            if group and process.pid:
                await group.terminate(process.pid)
        finally:
            spawn.kill(process)
            self._dying.discard(process)

    async def close(self) -> None:
        """Free what processes of a device share. They have ended."""
        await together(group.close() for group in {each.group for each in self.all if each.group} | self._kept)

    def disconnect(self) -> None:
        """Watch them no more, and close their channels."""
        self._watching.cancel()
        for each in self.all:
            each.disconnect()

    def open_page(self, tenant: str, processes: int) -> None:
        """Create the activity page of a tenant that comes, with so many HTTP processes, before any of them is started."""
        page = self._pages[tenant] = activity.create(1, processes)  # None that comes lends.
        for each in self.all:
            each.runtime.handover.set_pages({tenant: page})

    def close_page(self, tenant: str) -> None:
        """The HTTP processes of a tenant that goes have ended. Does nothing if it has no page."""
        if (page := self._pages.pop(tenant, None)) is not None:
            os.close(page)
            for each in self.all:
                each.runtime.handover.forget_page(tenant)

    async def begin(self, each: SupervisedDevice) -> None:
        """Start the process of a tenant that comes, and start it again whenever it ends. Raises OSError, EOFError, or what
        connecting to it does.
        """
        self.all.append(each)
        self._restarts.counts[each.label] = 0
        await self._start(each, coming=True)
        self._keep_from_now_on(each)

    async def end(self, each: SupervisedDevice) -> None:
        """End a process that has no tenant any more, and with the last one of a group what they shared. Does nothing if it was
        not started.
        """
        each.retired = True
        try:
            async with asyncio.timeout(CLOSE_LIMIT):
                await each.runtime.close()
        except TimeoutError:
            log.error("%s has not closed its device within %g s; killing it", each.label, CLOSE_LIMIT)
            if each.process:
                await self._terminate(each.process, each.group)
        except (RequestError, PartitionError) as error:
            log.error("%s was not closed in order: %s", each.label, error)
        each.disconnect()
        if each.process:
            await asyncio.to_thread(spawn.join, each.process, EXIT_TIMEOUT)
        if each in self.all:
            self.all.remove(each)
            self._restarts.counts.pop(each.label, None)
            if (group := each.group) and not any(other.group is group for other in self.all):
                await group.close()  # Before one that comes from now on asks for what it starts with.

    async def _start(self, each: SupervisedDevice, coming: bool = False) -> None:
        """Start a device process. One that replaces another has also opened the device again when this returns.

        One without a tenant any more is not started.
        """
        if each.retired:  # Its group may be closed.
            return
        environment = await each.group.environment(coming) if each.group else {}
        if each.retired:
            return
        frontends = each.runtime.frontends
        links, config = {name: frontend.descriptors for name, frontend in frontends.items()}, self._current.config
        deposit = each.group.deposit if each.group else None

        def arguments(channel: socket.socket, descriptors: socket.socket) -> Any:
            inherited = {name: spawn.inherited(link) for name, link in links.items()}
            shared = spawn.inherited_each(deposit.descriptors) if deposit else ()
            return each.make_arguments(config, channel, descriptors, inherited, environment, shared)

        each.runtime.end = partial(self._end_stuck, each)
        await each.start(each.target, arguments, each.runtime.handlers())
        if each.retired:
            each.kill()
            return
        if each.group and each.group.deposit is not deposit:  # All others have ended, and share something else from now on.
            log.error("the processes of device %s ended while %s was started; starting it again", each.device, each.label)
            each.kill()
        self._current.send_log_level(each.channel)
        await connect(each.runtime, each)
        each.runtime.handover.set_pages(self._pages)
        for name, link in links.items():
            if name in frontends and frontends[name].descriptors is not link:  # Its HTTP process was replaced meanwhile.
                await each.runtime.handover.replace_link(name)
        if links.keys() != frontends.keys():
            log.error("a tenant moved while %s was started; starting it again", each.label)
            each.kill()
        kill_if_outdated(each, config, self._current.config)

    def _end_stuck(self, each: SupervisedDevice, reason: str) -> None:
        log.error("%s: %s; ending it", each.label, reason)
        self._kill(each)

    def _keep_from_now_on(self, each: SupervisedDevice) -> None:
        """Start this process again whenever it ends, and keep its group."""
        self._watching.start(self._keep(each))
        if (group := each.group) and group not in self._kept:
            self._kept.add(group)
            self._watching.start(group.keep(partial(self._end_group, group)))

    def _end_group(self, group: MpsGroup, culprit: int) -> None:
        """End every process of a device that has failed for all of them. If it is known whose kernel that was, the others are
        started again at once, however often that happens: they are served while that one waits.
        """
        of_it = [each for each in self.all if each.group is group]
        known = any(each.process and each.process.pid == culprit for each in of_it)
        for each in of_it:
            if each.process and each.process.pid == culprit:
                log.critical("%s: it was a kernel of this process that failed", each.label)
            elif known:
                each.backoff = Backoff()
            each.kill()

    async def _restart(self, each: SupervisedDevice) -> None:
        """Start a device process again, with new links: the old ones have what the process before was about to do."""
        each.disconnect()
        for name, frontend in list(each.runtime.frontends.items()):
            await self._relink(name, frontend)
        await self._start(each)

    async def _keep(self, each: SupervisedDevice) -> None:
        """Start this device process again whenever it ends, until the server closes. Other devices' tenants are not touched."""
        while True:
            await each.channel.closed.wait()
            if self._restarts.closing.is_set() or each.retired:
                return
            each.runtime.disconnect(f"{each.label} has ended and is being started again")
            await self._restarts.wait_for_end(each.process, each.label, each.backoff)
            await self._restarts.retry(lambda: self._restart(each))
