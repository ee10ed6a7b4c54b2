"""Starts the dispatcher, the HTTP processes and the device processes, watches them, and replaces those that end or hang."""

import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import chain
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any

from ...config.schema import Config
from ...control.together import all_or_none
from ...host import logs
from ...host.watch import interval
from ...link.occupancy import LEAD
from ...tenants.frontend import State
from ..channels.calls import proxy
from ..channels.http_protocols import Logging
from ..channels.routing import SHARED, UNAUTHENTICATED
from ..children import spawn
from ..children.heartbeat import INTERVAL
from ..remote.remote_frontend import RemoteFrontend
from .affinity import Affinity
from .restarts import EXIT_TIMEOUT, Restarts, WatchTasks
from .supervised import Current, HostedRuntime, Supervised, SupervisedDevice, SupervisedProcess
from .supervised_devices import SupervisedDevices
from .supervised_dispatcher import LABEL as DISPATCHER
from .supervised_dispatcher import SupervisedDispatcher
from .supervised_http import SupervisedHttp


class Supervisor:
    """All processes but the one in which this runs. Belongs to the event loop.

    `application` answers the requests that HTTP processes forward. `on_relinked` is awaited when a tenant's process has ended,
    before the next one starts, with the tenant's name and a function that frees the old link: the tenant has a new link then.
    `pages` are the descriptors of tenants' activity pages, changed as tenants come and go, `counts` the tenants with several
    HTTP processes. `restarts` is where processes that ended are counted, by their names in the log, `refused` the same for
    connections that the dispatcher refused, by the reason.
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
        pages: dict[str, int] | None = None,
        counts: Mapping[str, int] = MappingProxyType({}),
        restarts: MutableMapping[str, int] | None = None,
        refused: MutableMapping[str, int] | None = None,
    ) -> None:
        pages = {} if pages is None else pages
        self._own = list(chain(*own.values()))
        self._current = current = Current(config)
        self._restarts = Restarts(restarts)
        self._watching = WatchTasks()
        self._processes: dict[str, SupervisedProcess] = {}
        self._dispatcher = SupervisedDispatcher(listeners, self._processes, current, self._restarts, refused)
        self.http = SupervisedHttp(
            self._processes, self._dispatcher, application, on_relinked, pages, current, self._restarts, self._watching
        )
        for name, frontend in frontends.items():
            process = SupervisedProcess(name, frontend, own.get(name, ()), hosted.get(name))
            self.http.add(process, counts.get(name, LEAD))
        for name in (SHARED, UNAUTHENTICATED):
            self.http.add(SupervisedProcess(name, None))
        self.devices = SupervisedDevices(devices, pages, self.http.relink, current, self._restarts)
        labels = [each.label for each in self._processes.values()] + [each.label for each in devices]
        self._restarts.counts.update(dict.fromkeys((DISPATCHER, *labels), 0))

    async def start(self) -> None:
        """Start every process. They serve from now on. After an error, or once it was cancelled, `kill` ends those that run."""
        await all_or_none((self.devices.start(), self._dispatcher.start(), self.http.start()))
        self._watching.start(self._dispatcher.keep())
        self._watching.start(self._check_heartbeats())
        self.http.keep()
        self.devices.keep()

    def set_state(self, state: State, progress: str = "") -> None:
        """Notify every process of the server's state, and how far its start is."""
        self._current.state, self._current.progress = state, progress
        self.http.set_state(state, progress)

    def set_log_level(self, level: str) -> None:
        """Have every process log at this level, this one and later replacements too; the dispatcher keeps its own."""
        self._current.log_level = level
        logs.set_level(level)
        processes: list[Supervised] = [*self._processes.values(), *self.devices.all]
        for each in processes:
            proxy(Logging, each.channel).set_log_level(level)

    def set_affinity(self, affinity: Affinity) -> None:
        """Restrict HTTP processes and dispatcher, and their later replacements, to these cores."""
        self._current.cores = affinity.others
        self.http.set_affinity(affinity)
        self._dispatcher.restrict()

    async def reconfigure(self, config: Config) -> None:
        """Have every process use this configuration, and those that start from now on; returns when all of them do."""
        self._current.config = config
        await self._dispatcher.reconfigure()
        await self.http.reconfigure()  # After the dispatcher, to which they may give back connections of tenants that come.

    async def close(self) -> None:
        """Accept no more connections, and let every process but the device processes answer its requests and end."""
        self._restarts.closing.set()
        for listener in self._own:
            listener.close()
        await self._dispatcher.close()  # Before the others: connections that it has handed over are still to be answered.
        self.http.exit()
        await self._watching.wait(EXIT_TIMEOUT)
        self._kill_http()

    def kill(self) -> None:
        """Kill every process that is left, and wait until it is gone. Blocks for a moment."""
        self._restarts.closing.set()
        self.devices.disconnect()
        self._kill_http()
        _kill(self.devices.processes())
        spawn.Forkserver.end_orphans()

    async def free_devices(self) -> None:
        """Free what device processes shared, after `kill`."""
        await self.devices.close()

    def kill_from_any_thread(self) -> None:
        """Send SIGKILL to every process that is left, and to the forkserver, and wait for none. Any thread."""
        for child in (*self.devices.processes(), *self.http.processes(), self._dispatcher.process):
            if child:
                spawn.kill(child)
        spawn.Forkserver.kill()

    def _kill_http(self) -> None:
        """Kill the dispatcher and the HTTP processes, and wait until they are gone."""
        self._watching.cancel()
        self.http.disconnect()
        self._dispatcher.disconnect()
        _kill((self._dispatcher.process, *self.http.processes()))

    async def _check_heartbeats(self) -> None:
        """Check regularly that every process answers or runs, and kill one that does not; it is then replaced."""
        forkserver = spawn.Forkserver()
        while not self._restarts.closing.is_set() and (watchdog := self._current.config.server.watchdog):
            now = time.monotonic()
            self.http.check_heartbeats(now)
            forkserver.check(now)
            self.devices.kill_if_stopped(now, watchdog)
            self._dispatcher.check_heartbeat(now)
            await self._restarts.sleep(min(INTERVAL, interval(watchdog)))


def _kill(processes: Iterable[BaseProcess | None]) -> None:
    """Kill these, and wait until they are gone. Blocks for a moment."""
    for process in processes:
        if process:
            spawn.kill(process)
            process.join()
