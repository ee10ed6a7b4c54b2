"""The supervisor of a server whose tenants and devices have processes of their own: from a configuration to an exit status."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import chain
from typing import Any

from ..admin.lifecycle import ServerEnd
from ..config.schema import Config, DeviceConfig
from ..control.controller import Controller
from ..control.reload import ReadConfig, Reloader, without_file
from ..control.together import all_or_none, together
from ..control.watcher import Watcher
from ..host.leaving import end_now, give_up
from ..host.signals import Terminal
from ..host.watchdog import Watchdog
from .children import spawn
from .composition import Composition
from .device_side.identify import identify
from .device_side.runtime_server import Opener
from .supervision import listen
from .supervision.affinity import TOO_FEW_CORES, conflicts, share_cores
from .supervision.mps_group import MpsGroup, open_groups
from .supervision.supervised import SupervisedDevice
from .supervision.supervisor import Supervisor

log = logging.getLogger("greenlane.processes")


async def serve(
    config: Config,
    opener: Opener,
    listeners: Sequence[socket.socket],
    own: Mapping[str, Sequence[socket.socket]],
    abandon: Callable[[int], object] = end_now,
    cores: Callable[[int], Iterable[int]] = os.sched_getaffinity,
    hosted: Collection[str] = (),
    read: ReadConfig = without_file,
) -> int:
    """Serve until SIGTERM, SIGINT or the SIGHUP of a terminal that closes, then drain. Returns the exit status.

    Any other SIGHUP reloads the configuration, which `read` reads again.

    `opener` opens a device as it is configured, in the process that has it; it is sent there, so it is a function of
    a module. `hosted` are the devices that are cores of this host: each tenant's own process has the tenant's device side.
    `abandon` ends this process with a status. It is called on a second signal, with GAVE_UP if requests were unanswered.
    `cores` returns the host's cores that a process may run on. Those that no device sets aside for tenants are shared out among
    the device processes and the HTTP processes. Raises ConfigError or PartitionError for a configuration that cannot be served.
    """
    signalled = _catch_signals()
    terminal = Terminal()
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Processes that start now end with this one, not with the terminal.
    async with Watchdog(config.server), AsyncExitStack() as left:
        await asyncio.to_thread(spawn.prepare)
        allowed = frozenset(cores(0))
        groups = await _open_groups(config, opener, hosted, signalled)
        left.push_async_callback(_close, groups.values())
        server = Composition(config, opener, hosted, groups, len(allowed), listeners, own, read)
        if hang_up != signal.SIG_IGN:  # Under nohup it is ignored.
            on_hang_up = partial(_hang_up, terminal, signalled, server.reloader)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hang_up)
        try:
            async with AsyncExitStack() as watching:

                async def load() -> None:
                    """HTTP processes say that the server starts while the repository is looked at, whose disk may hang."""
                    await watching.enter_async_context(Watcher(server.controller))
                    await server.controller.start()

                def on_started() -> None:
                    _set_affinity(config, server.supervisor, server.controller, server.devices, allowed, server.counts)
                    log.info("listening on %s", ", ".join(map(listen.url, chain(listeners, *own.values()))))

                start = partial(_start, server.supervisor, load)
                return await _run_until_end(signalled, server.supervisor, server.controller, start, on_started, abandon)
        finally:
            server.supervisor.kill()
            await server.supervisor.free_devices()


async def _open_groups(
    config: Config, opener: Opener, hosted: Collection[str], signalled: asyncio.Event
) -> Mapping[str, MpsGroup]:
    """The processes under MPS, by device; none once there is a signal, as the start is given up then. Raises ConfigError."""

    async def look(name: str, device: DeviceConfig, environment: Mapping[str, str]) -> str:
        return await identify(name, config.server, device, opener, environment)

    opening = asyncio.create_task(open_groups(config, hosted, look))
    if await _first(asyncio.wait({opening}), signalled.wait()):
        opening.cancel()
        await asyncio.wait({opening})
    return {} if opening.cancelled() else opening.result()


async def _close(groups: Iterable[MpsGroup]) -> None:
    await together(each.close() for each in groups)


async def _start(supervisor: Supervisor, load: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start processes, and devices and models at the same time: the second wait for the first."""
    await all_or_none((supervisor.start(), load()))


def _set_affinity(
    config: Config,
    supervisor: Supervisor,
    controller: Controller,
    devices: Sequence[SupervisedDevice],
    allowed: Iterable[int],
    counts: Mapping[str, int],
) -> None:
    """Keep HTTP off the cores of device processes, and both off partitions that are of cores, unless any core may be used."""
    configured = {name: tenant.front_cores for name, tenant in config.tenants.items()}
    reserved = {name: cores or () for device in controller.devices for name, cores in device.host_cores.items()}
    for line in conflicts(configured, reserved):
        log.warning("%s", line)
    left = {name: cores for name, cores in configured.items() if not reserved.get(name)}
    if not left or not devices or config.server.front_cores == "any":
        return
    free = frozenset(allowed).difference(*reserved.values())
    if affinity := share_cores(free, left, [each.name for each in devices], counts):
        supervisor.set_affinity(affinity)
        for each in devices:
            each.runtime.set_affinity(affinity.devices[each.name], affinity.builds(each.name), starting=free)
        spawn.set_own_affinity(affinity.others)
        log.info("%s", affinity)
    else:
        log.warning("%s", TOO_FEW_CORES)


async def _run_until_end(
    signalled: asyncio.Event,
    supervisor: Supervisor,
    controller: Controller,
    start: Callable[[], Coroutine[Any, Any, None]],
    on_started: Callable[[], None],
    abandon: Callable[[int], object],
) -> int:
    """Start, wait for a signal, and drain. Returns the exit status. A start that has not ended by then is given up."""

    def kill(status: int) -> None:
        supervisor.kill_from_any_thread()
        abandon(status)

    async def shut_down() -> None:
        given_up = starting.cancel()
        await end.drain()
        if given_up:  # No process has work of tenants, so all are killed.
            await asyncio.gather(starting, return_exceptions=True)
            return
        await supervisor.close()
        await controller.close()

    end = ServerEnd(controller, kill)
    starting = asyncio.create_task(start())
    try:
        if not await _first(asyncio.wait({starting}), signalled.wait()):
            starting.result()
            end.freeze_when_loaded()
            on_started()
            await signalled.wait()
        signalled.clear()
        if await _first(shut_down(), signalled.wait()):
            status = give_up(await _unanswered(controller))
            supervisor.kill()
            supervisor.kill_from_any_thread()  # Also a process that is just being started.
            abandon(status)
            return status
        return 0
    finally:
        end.close()


async def _unanswered(controller: Controller) -> int:
    """The unanswered requests in tenants' processes, without those of a process that does not answer. Takes up to a second."""
    return sum(each.lane.waiting + each.lane.in_flight for _, each in await controller.reports() if not each.age)


async def _first(*waiting: Coroutine[Any, Any, Any]) -> int:
    """The index of the one that is done first; raises what it raised. The others are cancelled."""
    tasks = [asyncio.create_task(one) for one in waiting]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    index, first = next((index, task) for index, task in enumerate(tasks) if task.done())
    for task in tasks:
        task.cancel()
    await first
    return index


def _hang_up(terminal: Terminal, signalled: asyncio.Event, reloader: Reloader) -> None:
    """SIGHUP: the terminal has closed, which ends the server, or the configuration is to be read again."""
    if terminal.closed:
        signalled.set()
    else:
        reloader.on_signal()


def _catch_signals() -> asyncio.Event:
    """An event that is set by SIGTERM and SIGINT."""
    signalled, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    return signalled
