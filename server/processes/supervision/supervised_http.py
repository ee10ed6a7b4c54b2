"""The HTTP processes as the supervisor has them: started, sent changes, asked for heartbeats, and replaced when they end."""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from ...config.schema import Config
from ...control.together import all_or_none
from ...errors import RequestError
from ...link import activity
from ...link.occupancy import LEAD
from ...link.ring import Descriptors
from ...tenants.frontend import State
from ..channels import handoff
from ..channels.calls import proxy, send, serve
from ..channels.http_protocols import ForwardedAnswer, ForwardedRequest, FromHttpProcess, Live, ToHttp, Wanted
from ..channels.rpc import Channel, Handlers
from ..children import spawn
from ..children.heartbeat import Heartbeat
from ..children.process_setup import ProcessArguments
from ..http_side import http_process
from ..http_side.proxy import answer
from ..remote.remote_frontend import RemoteFrontend
from . import listen
from .affinity import Affinity
from .helper_processes import HelperProcesses
from .restarts import EXIT_TIMEOUT, Restarts, WatchTasks
from .supervised import Current, HostedRuntime, SupervisedProcess, connect, kill_if_hung, kill_if_outdated
from .supervised_dispatcher import MOST_FAILURES, SupervisedDispatcher

log = logging.getLogger("greenlane.processes")

_MAX_HOLD = 2.0
"""Seconds for which a tenant's connections wait at most until its replaced process has loaded its models. After that those that
are loaded are served, and requests for the others are answered 503, which is better than no answer."""


class SupervisedHttp:
    """Those of all tenants, the shared and the unauthenticated one. Belongs to the event loop.

    `processes` are all of them by name, changed here. `application` answers the requests that they forward. `on_relinked` is
    awaited when a tenant's process has ended, before the next one starts, with the tenant's name and a function that frees the
    old link: the tenant has a new link then. `pages` are the descriptors of tenants' activity pages.
    """

    def __init__(
        self,
        processes: dict[str, SupervisedProcess],
        dispatcher: SupervisedDispatcher,
        application: Any,
        on_relinked: Callable[[str, Callable[[], None]], Awaitable[None]],
        pages: Mapping[str, int],
        current: Current,
        restarts: Restarts,
        watching: WatchTasks,
    ) -> None:
        self._processes = processes
        self._dispatcher = dispatcher
        self._application = application
        self._on_relinked = on_relinked
        self._pages = pages
        self._current = current
        self._restarts = restarts
        self._watching = watching
        self._helpers: dict[str, HelperProcesses] = {}

    def add(self, each: SupervisedProcess, count: int = LEAD) -> None:
        """Add a process, with so many of its tenant in all. None is started yet."""
        self._processes[each.name] = each
        if count > LEAD:
            numbers = range(LEAD + 1, count + LEAD)
            each.helpers = [SupervisedProcess(each.tenant, None, each.listeners, number=number) for number in numbers]
            self._processes |= {one.name: one for one in each.helpers}
            self._helpers[each.name] = HelperProcesses(
                each, self._start_process, self._reset_pages, self._dispatcher, self._restarts
            )

    def processes(self) -> list[BaseProcess | None]:
        return [each.process for each in self._processes.values()]

    async def start(self) -> None:
        """Start all of them, or give up all."""
        await all_or_none(map(self._start, self._leads()))

    def keep(self) -> None:
        """Replace each whenever it ends, until the server closes."""
        for each in self._leads():
            self._watching.start(self._keep(each))

    def set_state(self, state: State, progress: str = "") -> None:
        """Notify them of the server's state, and how far its start is."""
        for each in self._processes.values():
            if each.frontend:
                each.frontend.set_state(state, progress)
            elif each.number == LEAD:
                proxy(ToHttp, each.channel).follow(Wanted(state, progress))

    def set_affinity(self, affinity: Affinity) -> None:
        """Restrict them, and their later replacements, to these cores."""
        for each in self._processes.values():
            if each.frontend:
                if cores := affinity.tenants.get(each.name):  # None for one that runs on its partition's.
                    each.frontend.assign_cores(cores)
            elif each.number == LEAD and each.process:
                self._current.restrict(each.process)

    async def reconfigure(self) -> None:
        """Have all of them use the current configuration; returns when they do."""
        live, channels = Live.of(self._current.config), [each.channel for each in self._processes.values()]
        calls = [proxy(ToHttp, channel).reconfigure(live) for channel in channels if not channel.closed.is_set()]
        await asyncio.gather(*calls, return_exceptions=True)  # One that has ended is replaced by one with this configuration.

    async def begin(
        self,
        config: Config,
        name: str,
        frontend: RemoteFrontend,
        listeners: Sequence[socket.socket] = (),
        hosted: HostedRuntime | None = None,
        count: int = LEAD,
    ) -> None:
        """Start the process of a tenant that comes by this configuration. Before `admit` no connection is handed to it, and it
        is not replaced; `end` ends it. Raises OSError, EOFError, or what connecting to it does.
        """
        each = SupervisedProcess(name, frontend, listeners, hosted)
        self.add(each, count)
        if helpers := self._helpers.get(name):
            helpers.prepare(config.tenants[name].memory)
        await self._start_process(each, None if hosted else spawn.inherited(frontend.descriptors), config=config)
        assert each.descriptors
        await frontend.connect(each.channel, each.descriptors)
        if hosted:
            await hosted.runtime.connect(each.channel, each.descriptors)

    async def admit(self, name: str) -> None:
        """Hand connections to the process of a tenant that has come, and replace it if it ends. Helpers are started as well."""
        each = self._processes[name]
        assert each.frontend
        each.frontend.set_state(self._current.state)
        each.takes_connections = True
        self._dispatcher.announce(each)
        self._listen(each)
        self._restarts.counts[each.label] = 0
        await self._start_helpers(each)
        self._watching.start(self._keep(each))

    def _listen(self, each: SupervisedProcess) -> None:
        """Accept connections on the own port of a tenant that has come. Here as well, as the process may take a moment."""
        try:
            listen.begin(each.listeners)
        except OSError as error:
            log.error("%s cannot listen on its tenant's port; restart the server: %s", each.label, error.strerror)
            for one in (each, *each.helpers):  # Its replacements serve the common port only.
                one.listeners = []
        else:
            proxy(ToHttp, each.channel).listen()

    def retire(self, name: str) -> None:
        """Start no process of this tenant again. A new dispatcher hands it no connections."""
        for each in (self._processes[name], *self._processes[name].helpers):
            each.retired, each.takes_connections = True, False

    async def end(self, name: str) -> None:
        """End the processes of a tenant that has gone, or that has not come after all. Does nothing if there are none."""
        if (each := self._processes.get(name)) is None:
            return
        self.retire(name)
        everyone = [each, *each.helpers]
        for one in everyone:
            proxy(ToHttp, one.channel).exit()
        for one in everyone:
            if one.process:
                await asyncio.to_thread(spawn.join, one.process, EXIT_TIMEOUT)
            self._dispatcher.withdraw(one)
        await asyncio.to_thread(spawn.Forkserver.end_orphans)
        if helpers := self._helpers.pop(name, None):
            await helpers.end()
            helpers.close()
        for listener in each.listeners:
            listener.close()
        for one in everyone:
            del self._processes[one.name]
            self._restarts.counts.pop(one.label, None)

    async def relink(self, name: str, frontend: RemoteFrontend) -> None:
        """Give a tenant's process a new link to its memory; one that cannot take it is killed: the next one starts with one."""
        try:
            (await frontend.relink())()
        except RequestError as error:
            each = self._processes[name]
            log.error("%s cannot change its link; killing it: %s", each.label, error)
            each.kill()

    def check_heartbeats(self, now: float) -> None:
        """Send each a heartbeat, and kill one that has not answered for too long; it is then replaced.

        One that gets no heartbeats answers that the server is not ready.
        """
        for each in list(self._processes.values()):
            answer = asyncio.ensure_future(proxy(ToHttp, each.channel).heartbeat())
            answer.add_done_callback(partial(_on_heartbeat, each.heartbeat))
            if each.process and not each.channel.closed.is_set():
                away = not each.takes_connections or self._current.state == "starting"
                loading = each.hosted is not None and (away or each.hosted.runtime.away)
                kill_if_hung(each.label, each.process, each.heartbeat, now, loading)

    def exit(self) -> None:
        """Have all of them answer the requests that they have, and end."""
        for each in self._processes.values():
            proxy(ToHttp, each.channel).exit()

    def disconnect(self) -> None:
        """Close the channels and sockets to all, and what the processes of one tenant share."""
        for each in self._processes.values():
            each.disconnect()
        for helpers in self._helpers.values():
            helpers.close()

    def _leads(self) -> list[SupervisedProcess]:
        """All but the helpers, which start and end with their lead."""
        return [each for each in self._processes.values() if each.number == LEAD]

    async def _start(self, each: SupervisedProcess) -> None:
        """Start a process, with its helpers. Where that fails repeatedly, its connections are refused until it does not."""
        try:
            await self._try_to_start(each)
        finally:
            each.failures = 0 if each.takes_connections or each.retired else each.failures + 1
            if each.failures == MOST_FAILURES:
                self._dispatcher.refuse(each)

    async def _try_to_start(self, each: SupervisedProcess) -> None:
        if each.retired:
            return
        helpers, config = self._helpers.get(each.name), self._current.config
        if helpers:
            helpers.prepare(config.tenants[each.name].memory)
        await self._start_process(
            each, spawn.inherited(each.frontend.descriptors) if each.frontend and not each.hosted else None
        )
        if each.retired:  # While it was started, so `end` has not seen it.
            each.kill()
            each.disconnect()
            return
        if each.frontend:
            assert each.descriptors
            await each.frontend.connect(each.channel, each.descriptors)
            if each.hosted:
                if not await connect(each.hosted.runtime, each):
                    return
                kill_if_outdated(each, config, self._current.config)
                await each.hosted.runtime.resumed(_MAX_HOLD)  # Connections wait meanwhile, which is better than a 503.
        else:
            if each.process:
                self._current.restrict(each.process)
            proxy(ToHttp, each.channel).follow(Wanted(self._current.state, self._current.progress))
        each.takes_connections = True  # Only now that it knows its models: it would answer that there are none.
        self._dispatcher.announce(each)
        await self._start_helpers(each)
        if self._restarts.closing.is_set():
            proxy(ToHttp, each.channel).exit()

    async def _start_helpers(self, each: SupervisedProcess) -> None:
        if helpers := self._helpers.get(each.name):
            for task in await helpers.start():
                self._watching.add(task)

    async def _start_process(
        self,
        each: SupervisedProcess,
        link: Descriptors | None,
        to_lead: socket.socket | None = None,
        config: Config | None = None,
    ) -> None:
        """Start one HTTP process, which has this link; a helper is the lead's, and has the socket for its cancellations.

        With a `config`, that of a tenant that comes, it has that one, and not the current one.
        """
        used = config or self._current.config
        self._reset_pages(each)
        if each.handoff:  # It could not be started before.
            each.handoff.close()
        each.handoff = handoff.pair()

        def arguments(*ends: socket.socket) -> Any:
            found = self._arguments(each, used, ends, link, to_lead, arriving=config is not None)
            return each.hosted.make_arguments(found) if each.hosted else found

        await each.start(each.hosted.target if each.hosted else http_process.main, arguments, self.handlers(each))
        assert each.process
        _close_with(each.process, each.channel)
        if used is not (config or self._current.config):  # It has changed meanwhile.
            send(proxy(ToHttp, each.channel).reconfigure(Live.of(self._current.config)))
        self._current.send_log_level(each.channel)

    def _arguments(
        self,
        each: SupervisedProcess,
        config: Config,
        ends: Sequence[socket.socket],
        link: Descriptors | None,
        to_lead: socket.socket | None,
        arriving: bool,
    ) -> ProcessArguments:
        """What a process is started with. `ends` are those for messages and for descriptors."""
        assert each.handoff
        for_messages, for_descriptors = ends
        seen = {each.tenant}
        if each.hosted:  # Its device side looks at those of its neighbours.
            seen |= {one.tenant for one in self._processes.values() if one.hosted}
        pages = {name: page for name, page in self._pages.items() if name in seen}
        occupancy = self._processes[each.tenant].occupancy
        return ProcessArguments(
            name=each.tenant,
            config=config,
            handoff=each.handoff.theirs,
            channel=for_messages,
            descriptors=for_descriptors,
            link=link,
            listeners=each.listeners,
            pages=spawn.inherited_all(pages),
            number=each.number,
            occupancy=None if occupancy is None else spawn.Inherited(occupancy),
            to_lead=to_lead,
            arriving=arriving,
        )

    def handlers(self, each: SupervisedProcess) -> Handlers:
        """The handlers of what a process that starts now may call."""
        each.heartbeat = Heartbeat()
        handlers = serve(FromHttpProcess)(lambda: self)
        if each.frontend:
            handlers |= each.frontend.handlers()
        elif frontend := self._processes[each.tenant].frontend:
            handlers |= frontend.handlers_of_helpers()
        if each.hosted:
            handlers |= each.hosted.runtime.handlers_of_hosted()
            each.hosted.runtime.end = partial(self._end_stuck, each)
        return {name: handler._replace(bounded=True) for name, handler in handlers.items()}

    async def _keep(self, each: SupervisedProcess) -> None:
        """Replace this process whenever it ends, until the server closes."""
        while True:
            await each.channel.closed.wait()
            if self._restarts.closing.is_set() or each.retired:
                return
            self._dispatcher.withdraw(each)
            if each.channel.distrusted:
                each.kill()
            if each.name in self._helpers:
                await self._helpers[each.name].end()
            if each.hosted:
                each.hosted.runtime.disconnect(f"{each.label} has ended and is being started again")
            ended = partial(self._reset_pages, each, *each.helpers)
            await self._restarts.wait_for_end(each.process, each.label, each.backoff, ended)
            if each.retired:  # Its tenant has gone meanwhile, and another one of its name may have come.
                return
            if (frontend := each.frontend) and not each.hosted:
                # The worker frees the old link before another process may write to the memory that it reads from.
                await self._restarts.retry(lambda: self._on_relinked(each.name, frontend.renew()))
            await self._restarts.retry(lambda: self._start(each))

    def _reset_pages(self, *ended: SupervisedProcess) -> None:
        """These processes of tenants have ended, and have no request open any more."""
        for each in ended:
            if not each.retired and (page := self._pages.get(each.tenant)) is not None:
                activity.reset(page, each.number)

    def _end_stuck(self, each: SupervisedProcess, reason: str) -> None:
        log.error("%s: %s; ending it", each.label, reason)
        each.kill()

    async def forward(self, request: ForwardedRequest) -> ForwardedAnswer:
        return await answer(self._application, request)


def _on_heartbeat(heartbeat: Heartbeat, answer: "asyncio.Future[None]") -> None:
    """The process has answered, or has ended."""
    if not answer.cancelled() and answer.exception() is None:
        heartbeat.on_answer()


def _close_with(process: BaseProcess, channel: Channel) -> None:
    """Close the channel when its process ends, though others that it has started may have the other end open as well."""
    loop, watched = asyncio.get_running_loop(), process.sentinel
    with suppress(OSError):  # Linux has it from 5.3 on. The sentinel can be read at the end of the forkserver as well.
        watched = os.pidfd_open(process.pid or 0)

    def ended() -> None:
        loop.remove_reader(watched)
        if watched != process.sentinel:
            os.close(watched)
        channel.finish()

    loop.add_reader(watched, ended)
