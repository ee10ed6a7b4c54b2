"""Starts the dispatcher and the HTTP processes, watches them, and replaces those that end or hang."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from itertools import chain, repeat
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any

import msgspec

from partitions import PartitionError

from ..config.changes import loaded_again
from ..config.schema import Config
from ..config.section import ConfigError
from ..errors import RequestError
from ..host import logs
from ..host.backoff import Backoff
from ..host.watch import interval
from ..link import activity
from ..link.occupancy import LEAD
from ..link.ring import Descriptors
from ..tenants.auth import Tenancy
from ..tenants.frontend import State
from . import descriptors, dispatcher, handoff, http_process, messages, spawn
from .affinity import Affinity
from .heartbeat import INTERVAL, Heartbeat, observe
from .helper_processes import HelperProcesses, Starting
from .http_process import ProcessArguments
from .linked_frontend import LinkedFrontend
from .proxy import answer
from .remote_frontend import RemoteFrontend
from .remote_runtime import RemoteRuntime
from .routing import SHARED, UNAUTHENTICATED
from .rpc import Channel
from .supervised import HostedRuntime, SupervisedDevice, SupervisedProcess

log = logging.getLogger("greenlane.processes")

EXIT_TIMEOUT = 5.0
"""Seconds that a process may take to end after it was asked to: more than `http.body.CLOSE_SECONDS`, which it gives
clients that do not read their answers."""
_DISPATCHER = "the dispatcher"
_MAX_HOLD = 20.0
"""Seconds for which a tenant's connections wait at most until its replaced process has loaded its models."""
_MAX_PAUSE = 10.0
"""Seconds between two attempts to start a process for which there may be no memory."""


class Supervisor:
    """All processes but the one in which this runs. Belongs to the event loop.

    `application` answers the requests that HTTP processes forward. `on_relinked` is awaited when a tenant's process has ended,
    before the next one starts, with the tenant's name and a function that frees the old link: the tenant has a new link then.
    `pages` are the descriptors of those of tenants that lend, `counts` the tenants with several HTTP processes. `restarts` is
    where processes that ended are counted, by their names in the log.
    """

    def __init__(
        self,
        config: Config,
        frontends: Mapping[str, RemoteFrontend],
        listeners: Sequence[socket.socket],
        own: Mapping[str, Sequence[socket.socket]],
        application: Any,
        on_relinked: Callable[[str, Callable[[], None]], Awaitable[None]],
        devices: Sequence[SupervisedDevice] = (),
        hosted: Mapping[str, HostedRuntime] = MappingProxyType({}),
        pages: Mapping[str, int] = MappingProxyType({}),
        counts: Mapping[str, int] = MappingProxyType({}),
        restarts: MutableMapping[str, int] | None = None,
    ) -> None:
        self._config = config
        self._closing = asyncio.Event()
        self._listeners = list(listeners)
        self._own = list(chain(*own.values()))
        self._application = application
        self._on_relinked = on_relinked
        self._http = {
            name: SupervisedProcess(name, frontend, own.get(name, ()), hosted.get(name)) for name, frontend in frontends.items()
        }
        self._helpers: dict[str, HelperProcesses] = {}
        for name, count in counts.items():
            if count > LEAD:
                self._add_helpers(self._http[name], count)
        self._http |= {name: SupervisedProcess(name, None) for name in (SHARED, UNAUTHENTICATED)}
        self._devices = list(devices)
        self._restarts = {} if restarts is None else restarts
        labels = [each.label for each in self._http.values()] + [each.label for each in self._devices]
        self._restarts.update(dict.fromkeys((_DISPATCHER, *labels), 0))
        self._pages = pages
        self._dispatcher: BaseProcess | None = None
        self._dispatcher_reconfigured = asyncio.Event()
        self._control: socket.socket | None = None
        self._dispatcher_backoff = Backoff()
        self._dispatcher_heartbeat = Heartbeat()
        self._state: State = "starting"
        self._cores: frozenset[int] = frozenset()
        self._log_level = ""
        self._watching: set[asyncio.Task[None]] = set()
        self._watching_devices: set[asyncio.Task[None]] = set()

    def _add_helpers(self, lead: SupervisedProcess, count: int) -> None:
        """Let this process be the lead of so many, itself included."""
        lead.helpers = [SupervisedProcess(lead.tenant, None, lead.listeners, number=at) for at in range(LEAD + 1, count + LEAD)]
        self._http |= {each.name: each for each in lead.helpers}
        calls = Starting(self._start_process, self._announce, self._withdraw, self._wait_for_end, self._retry, self._closing)
        self._helpers[lead.name] = HelperProcesses(lead, calls)

    def __repr__(self) -> str:
        return f"<Supervisor {self._state}, {', '.join(self._http)}>"

    async def start(self) -> None:
        """Start every process. They serve from now on. After an error some may run; `kill` ends them."""
        devices, leads = map(self._start_device, self._devices), [each for each in self._http.values() if each.number == LEAD]
        await asyncio.gather(*devices, self._start_dispatcher(), *map(self._start, leads))
        self._watch(self._keep_dispatcher())
        self._watch(self._check_heartbeats())
        for each in leads:
            self._watch(self._keep(each))
        for device in self._devices:
            self._watch(self._keep_device(device), self._watching_devices)

    def set_state(self, state: State) -> None:
        """Notify every process of the server's state."""
        self._state = state
        for each in self._http.values():
            if each.frontend:
                each.frontend.set_state(state)
            elif each.number == LEAD:
                each.channel.notify(messages.SetState(state))

    def set_log_level(self, level: str) -> None:
        """Have every process log at this level, this one and later replacements too; the dispatcher keeps its own."""
        self._log_level = level
        logs.set_level(level)
        processes: list[SupervisedProcess | SupervisedDevice] = [*self._http.values(), *self._devices]
        for each in processes:
            each.channel.notify(messages.SetLogLevel(level))

    def set_affinity(self, affinity: Affinity) -> None:
        """Restrict these processes, and their later replacements, to these cores."""
        self._cores = affinity.others
        for each in self._http.values():
            if each.frontend:
                if cores := affinity.tenants.get(each.name):  # None for one that runs on its partition's.
                    each.frontend.assign_cores(cores)
            elif each.number == LEAD:
                self._restrict(each.process)
        self._restrict(self._dispatcher)

    async def reconfigure(self, config: Config) -> None:
        """Have every process use this configuration, and those that start from now on; returns when all of them do."""
        self._config = config
        self._reconfigure_dispatcher()
        with suppress(TimeoutError):  # It hangs, and is killed soon.
            await asyncio.wait_for(self._dispatcher_reconfigured.wait(), EXIT_TIMEOUT)
        # After the dispatcher, to which they may give back connections of tenants that come.
        message, channels = messages.Reconfigure.of(config), [each.channel for each in self._http.values()]
        calls = [channel.call(message, bool) for channel in channels if not channel.closed.is_set()]
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
        each = self._http[name] = SupervisedProcess(name, frontend, listeners, hosted)
        if count > LEAD:
            self._add_helpers(each, count)
            self._helpers[name].prepare(config.tenants[name].memory)
        await self._start_process(each, None if hosted else spawn.inherited(frontend.descriptors), config=config)
        assert each.descriptors
        await frontend.connect(each.channel, each.descriptors)
        if hosted:
            await hosted.runtime.connect(each.channel, each.descriptors)

    async def admit(self, name: str) -> None:
        """Hand connections to the process of a tenant that has come, and replace it if it ends. Helpers are started as well."""
        each = self._http[name]
        assert each.frontend
        each.frontend.set_state(self._state)
        each.takes_connections = True
        self._announce(each)
        self._restarts[each.label] = 0
        if helpers := self._helpers.get(name):
            for task in await helpers.start():
                self._note(task, self._watching)
        self._watch(self._keep(each))

    def retire(self, name: str) -> None:
        """Start no process of this tenant again. A new dispatcher hands it no connections."""
        for each in (self._http[name], *self._http[name].helpers):
            each.retired, each.takes_connections = True, False

    async def end(self, name: str) -> None:
        """End the processes of a tenant that has gone, or that has not come after all. Does nothing if there are none."""
        if (each := self._http.get(name)) is None:
            return
        self.retire(name)
        everyone = [each, *each.helpers]
        for one in everyone:
            one.channel.notify(messages.Exit())
        for one in everyone:
            if one.process:
                await asyncio.to_thread(spawn.join, one.process, EXIT_TIMEOUT)
            self._withdraw(one)
        if helpers := self._helpers.pop(name, None):
            await helpers.end()
            helpers.close()
        for listener in each.listeners:
            listener.close()
        for one in everyone:
            del self._http[one.name]
            self._restarts.pop(one.label, None)

    def _reconfigure_dispatcher(self) -> None:
        """Send the dispatcher the keys; one that has ended is replaced by one that has them."""
        self._dispatcher_reconfigured.clear()
        file = handoff.memory_file(msgspec.json.encode(dispatcher.keys_of(self._config)))
        try:
            assert self._control
            socket.send_fds(self._control, [dispatcher.RECONFIGURE], [file])
        except OSError:
            self._dispatcher_reconfigured.set()
        finally:
            os.close(file)

    async def close(self) -> None:
        """Accept no more connections, and let every process but the device processes answer its requests and end."""
        self._closing.set()
        if self._control:
            with suppress(OSError):  # The dispatcher has just died, and this socket is closed already.
                self._control.shutdown(socket.SHUT_RDWR)
        for listener in (*self._listeners, *self._own):
            listener.close()
        if self._dispatcher:  # Before the others: connections that it has handed over are still to be answered.
            await asyncio.to_thread(spawn.join, self._dispatcher, EXIT_TIMEOUT)
        for each in self._http.values():
            each.channel.notify(messages.Exit())
        if self._watching:
            await asyncio.wait(self._watching, timeout=EXIT_TIMEOUT)
        self._kill_http()

    def kill(self) -> None:
        """Kill every process that is left, and wait until it is gone. Blocks for a moment."""
        self._closing.set()
        for task in self._watching_devices:
            task.cancel()
        for each in self._devices:
            each.disconnect()
        self._kill_http()
        _kill(each.process for each in self._devices)

    def _kill_http(self) -> None:
        """The same for the dispatcher and the HTTP processes."""
        for task in self._watching:
            task.cancel()
        for each in self._http.values():
            each.disconnect()
        for helpers in self._helpers.values():
            helpers.close()
        if self._control:
            self._control.close()
        _kill((self._dispatcher, *(each.process for each in self._http.values())))

    def kill_from_any_thread(self) -> None:
        """Send SIGKILL to every process that is left, and to the forkserver, and wait for none. Any thread."""
        devices, processes = self._devices, self._http.values()
        for child in (*(each.process for each in devices), *(each.process for each in processes), self._dispatcher):
            if child:
                spawn.kill(child)
        spawn.Forkserver.kill()

    async def _start(self, each: SupervisedProcess) -> None:
        helpers, config = self._helpers.get(each.name), self._config
        if helpers:
            helpers.prepare(self._config.tenants[each.name].memory)
        await self._start_process(
            each, spawn.inherited(each.frontend.descriptors) if each.frontend and not each.hosted else None
        )
        if each.frontend:
            assert each.descriptors
            await each.frontend.connect(each.channel, each.descriptors)
            if each.hosted:
                await self._connect(each.hosted.runtime, each)
                self._check_options(each, config)
                await each.hosted.runtime.resumed(_MAX_HOLD)  # Connections wait meanwhile, which is better than a 503.
        else:
            self._restrict(each.process)
            each.channel.notify(messages.SetState(self._state))
        each.takes_connections = True  # Only now that it knows its models: it would answer that there are none.
        self._announce(each)
        if helpers:
            for task in await helpers.start():
                self._note(task, self._watching)
        if self._closing.is_set():
            each.channel.notify(messages.Exit())

    async def _start_process(
        self,
        each: SupervisedProcess,
        link: Descriptors | None,
        to_lead: socket.socket | None = None,
        config: Config | None = None,
    ) -> None:
        """Start one HTTP process, which has this link; a helper is the lead's, and has the socket for its cancellations.

        With a `config` it is that one, and not the current one.
        """
        self._reset_pages(each)
        if each.handoff:  # It could not be started before.
            each.handoff.close()
        each.handoff = handoff.pair()
        ours, theirs = socket.socketpair()
        each.descriptors, their_descriptors = descriptors.pair()
        pages = spawn.inherited_all(
            {name: page for name, page in self._pages.items() if name == each.tenant or (each.hosted and each.frontend)}
        )
        ends, shared = (each.handoff.theirs, theirs, their_descriptors), self._http[each.tenant].occupancy
        occupancy = None if shared is None else spawn.Inherited(shared)
        spread = {name: spawn.inherited(of) for name, of in each.frontend.spread.items()} if each.frontend else {}
        arguments = ProcessArguments(
            each.tenant,
            config or self._config,
            *ends,
            None if spread else link,
            each.listeners,
            pages,
            each.number,
            occupancy,
            to_lead,
            spread,
        )
        heartbeat = each.heartbeat = Heartbeat()
        handlers: dict[type[messages.Message], Callable[[Any], Any]] = {
            messages.ForwardedRequest: self._forward,
            messages.HeartbeatAnswer: lambda _: heartbeat.on_answer(),
        }
        target: Callable[[Any], None] = http_process.main
        hosted, argument = each.hosted, arguments
        if each.frontend:
            handlers |= each.frontend.handlers()
        elif frontend := self._http[each.tenant].frontend:
            handlers |= frontend.handlers_of_helpers()
        if hosted:
            handlers |= hosted.runtime.handlers()
            target, argument = hosted.target, hosted.make_arguments(arguments)
        each.channel = Channel(each.label, handlers)
        each.backoff.started(time.monotonic())
        try:
            each.process = await spawn.start(target, argument)
        finally:
            their_descriptors.close()
            theirs.close()
        await each.channel.open(ours)
        if arguments.config is not (config or self._config):  # It has changed meanwhile.
            each.channel.notify(messages.Reconfigure.of(self._config))
        self._send_log_level(each)

    def _send_log_level(self, each: SupervisedProcess | SupervisedDevice) -> None:
        """Have a process that was just started log as the others do, if that was changed."""
        if self._log_level:
            each.channel.notify(messages.SetLogLevel(self._log_level))

    async def _start_device(self, each: SupervisedDevice) -> None:
        """Start a device process. One that replaces another has also opened the device again when this returns."""
        frontends = each.runtime.frontends
        ours, theirs = socket.socketpair()
        each.descriptors, their_descriptors = descriptors.pair()
        each.channel = Channel(each.label, each.runtime.handlers())
        each.backoff.started(time.monotonic())
        links, config = {name: frontend.descriptors for name, frontend in frontends.items()}, self._config
        try:
            inherited = {name: spawn.inherited(link) for name, link in links.items()}
            pages = spawn.inherited_all(self._pages)
            arguments = each.make_arguments(config, theirs, their_descriptors, inherited, pages)
            each.process = await spawn.start(each.target, arguments)
        finally:
            their_descriptors.close()
            theirs.close()
        await each.channel.open(ours)
        self._send_log_level(each)
        await self._connect(each.runtime, each)
        for name, link in links.items():
            if name in frontends and frontends[name].descriptors is not link:  # Its HTTP process was replaced meanwhile.
                await each.runtime.replace_link(name)
        if links.keys() != frontends.keys():
            log.error("a tenant moved while %s was started; starting it again", each.label)
            if each.process:
                spawn.kill(each.process)
        self._check_options(each, config)

    def _check_options(self, each: SupervisedProcess | SupervisedDevice, config: Config) -> None:
        """Kill a process with models that was started with this configuration, if models have other options now."""
        if each.process and loaded_again(config, self._config):
            log.error("models have other options since %s was started; starting it again", each.label)
            spawn.kill(each.process)

    async def _restart_device(self, each: SupervisedDevice) -> None:
        """Start a device process again, with new links: the old ones have what the process before was about to do."""
        each.disconnect()
        for name, frontend in list(each.runtime.frontends.items()):
            await self._relink(self._http[name], frontend)
        await self._start_device(each)

    async def _relink(self, each: SupervisedProcess, frontend: LinkedFrontend) -> None:
        """Give an HTTP process a new link to its memory; one that cannot take it is killed: the next one starts with one."""
        try:
            (await frontend.relink())()
        except RequestError as error:
            log.error("%s cannot change its link; killing it: %s", each.label, error)
            if each.process:
                spawn.kill(each.process)

    async def _connect(self, runtime: RemoteRuntime, each: SupervisedProcess | SupervisedDevice) -> None:
        """Have a runtime use this process. Where it replaces another that was serving, that is done again first."""
        assert each.descriptors
        try:
            await runtime.connect(each.channel, each.descriptors)
        except (PartitionError, ConfigError, RequestError) as error:
            log.error("%s cannot be started again: %s", each.label, error)
            if each.process:
                spawn.kill(each.process)  # Its channel closes, so that it is tried again.

    async def _keep_device(self, each: SupervisedDevice) -> None:
        """Start this device process again whenever it ends, until the server closes. Other devices' tenants are not touched."""
        while True:
            await each.channel.closed.wait()
            if self._closing.is_set():
                return
            each.runtime.disconnect(f"{each.label} has ended and is being started again")
            await self._wait_for_end(each.process, each.label, each.backoff)
            await self._retry(lambda: self._restart_device(each))

    async def _start_dispatcher(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._dispatcher_heartbeat = Heartbeat()
        self._dispatcher_backoff.started(time.monotonic())
        try:
            config, server = self._config, self._config.server
            tenancy = Tenancy(config.tenants.values(), server.default_tenant)
            arguments = tenancy, server.log_format, server.log_level, self._listeners, theirs
            self._dispatcher = await spawn.start(dispatcher.main, *arguments)
        finally:
            theirs.close()
        if config is self._config:
            self._dispatcher_reconfigured.set()
        else:  # It has changed meanwhile.
            self._reconfigure_dispatcher()
        self._restrict(self._dispatcher)
        for each in self._http.values():
            self._announce(each)

    def _restrict(self, process: BaseProcess | None) -> None:
        """Restrict a process without a tenant to the cores of such processes, once those are known."""
        if process and self._cores:
            spawn.set_affinity(process, self._cores)

    def _announce(self, each: SupervisedProcess) -> None:
        """Send the dispatcher the sockets over which this process takes connections. A new dispatcher is sent all of them."""
        if self._control and each.handoff and each.takes_connections:
            with suppress(OSError):
                socket.send_fds(self._control, [each.name.encode()], [end.fileno() for end in each.handoff])

    def _withdraw(self, each: SupervisedProcess) -> None:
        """Close the sockets to this process, which has ended, and have the dispatcher hand what it did not take to the next."""
        each.disconnect()
        if self._control:
            with suppress(OSError):
                self._control.send(dispatcher.WITHDRAWN + each.name.encode())

    async def _keep(self, each: SupervisedProcess) -> None:
        """Replace this process whenever it ends, until the server closes."""
        while True:
            await each.channel.closed.wait()
            if self._closing.is_set() or each.retired:
                return
            self._withdraw(each)
            if each.name in self._helpers:
                await self._helpers[each.name].end()
            if each.hosted:
                each.hosted.runtime.disconnect(f"{each.label} has ended and is being started again")
            await self._wait_for_end(each.process, each.label, each.backoff)
            self._reset_pages(each, *each.helpers)
            if (frontend := each.frontend) and not each.hosted:
                # The worker frees the old link before another process may write to the memory that it reads from.
                await self._retry(lambda: self._on_relinked(each.name, frontend.renew()))
            await self._retry(lambda: self._start(each))

    def _reset_pages(self, *ended: SupervisedProcess) -> None:
        """These processes of a tenant have ended: if it lends, they have no request open any more."""
        for each in ended:
            if (page := self._pages.get(each.tenant)) is not None:
                activity.reset(page, each.number)

    async def _keep_dispatcher(self) -> None:
        while not self._closing.is_set():
            assert self._control
            with suppress(OSError):
                while message := await asyncio.get_running_loop().sock_recv(self._control, dispatcher.MAX_NAME):
                    self._on_dispatcher(message)
            if self._closing.is_set():
                return
            self._control.close()
            await self._wait_for_end(self._dispatcher, _DISPATCHER, self._dispatcher_backoff)
            await self._retry(self._start_dispatcher)

    def _on_dispatcher(self, message: bytes) -> None:
        if message == dispatcher.HEARTBEAT_ANSWER:
            self._dispatcher_heartbeat.on_answer()
        elif message == dispatcher.RECONFIGURED:
            self._dispatcher_reconfigured.set()
        elif (each := self._http.get(message.decode(errors="replace"))) and each.process:
            log.error("%s sent the dispatcher a malformed handoff; killing it", each.label)
            spawn.kill(each.process)

    async def _check_heartbeats(self) -> None:
        """Send every process heartbeats, and kill one that does not answer them for too long; it is then replaced.

        An HTTP process that gets no heartbeats answers that the server is not ready.
        """
        forkserver = spawn.Forkserver()
        while not self._closing.is_set() and self._config.server.watchdog:
            now = time.monotonic()
            for each in list(self._http.values()):
                each.channel.notify(messages.Heartbeat())
                if each.process and not each.channel.closed.is_set():
                    away = not each.takes_connections or self._state == "starting"
                    loading = each.hosted is not None and (away or each.hosted.runtime.away)
                    self._check(each.label, each.process, each.heartbeat, now, loading)
            forkserver.check(now)
            for device in self._devices:
                if device.process and (seconds := device.stopped_for(now)) >= self._config.server.watchdog:
                    log.error("%s has been stopped for %.1f s (SIGSTOP or a debugger); killing it", device.label, seconds)
                    spawn.kill(device.process)
            if self._dispatcher:
                if self._dispatcher_heartbeat.answered and self._control:
                    with suppress(OSError):
                        self._control.send(dispatcher.HEARTBEAT)
                self._check(_DISPATCHER, self._dispatcher, self._dispatcher_heartbeat, now)
            await self._sleep(min(INTERVAL, interval(self._config.server.watchdog)))

    def _check(self, label: str, process: BaseProcess, heartbeat: Heartbeat, now: float, starting: bool = False) -> None:
        """Kill this process, which was just sent a heartbeat, if it has not answered for too long."""
        if heartbeat.answered:
            heartbeat.on_sent(now)
        elif process.pid and heartbeat.hangs(now, activity := observe(process.pid), starting) and activity.state not in "XZ":
            log.error("%s has not answered for %.1f s: %s; killing it", label, heartbeat.silent, activity)
            spawn.kill(process)

    async def _wait_for_end(self, process: BaseProcess | None, label: str, backoff: Backoff) -> None:
        """Wait until this process has ended, and then for as long as `backoff` says."""
        assert process
        await asyncio.to_thread(spawn.join, process, EXIT_TIMEOUT)
        self._restarts[label] = self._restarts.get(label, 0) + 1
        delay = backoff.delay(time.monotonic())
        log.error("%s ended (%s); starting another%s", label, spawn.exit_reason(process), f" in {delay:g} s" if delay else "")
        await self._sleep(delay)

    async def _retry(self, start: Callable[[], Awaitable[None]]) -> None:
        """Start a process, in as many attempts as it takes: the second at once, as the forkserver may just have ended."""
        for pause in chain((0.0,), repeat(_MAX_PAUSE)):
            if self._closing.is_set():
                return
            try:
                await start()
                return
            except (OSError, EOFError) as error:  # No memory, descriptors or process ids may be left.
                when = f"in {pause:g} s" if pause else "at once"
                log.error("no process can be started now (%s); trying again %s", error, when)
                await self._sleep(pause)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but not beyond the moment at which the server closes."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    def _watch(self, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]] | None" = None) -> None:
        self._note(asyncio.create_task(work), self._watching if tasks is None else tasks)

    def _note(self, task: "asyncio.Task[None]", tasks: "set[asyncio.Task[None]]") -> None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_log_failure)

    async def _forward(self, request: messages.ForwardedRequest) -> messages.ForwardedAnswer:
        return await answer(self._application, request)


def _kill(processes: Iterable[BaseProcess | None]) -> None:
    """Kill these, and wait until they are gone. Blocks for a moment."""
    for process in processes:
        if process:
            spawn.kill(process)
            process.join()


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()):
        log.critical("a process is no longer watched: %s", error, exc_info=error)
