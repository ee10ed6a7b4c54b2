"""The device process of a server whose tenants have HTTP processes: from a configuration to an exit status."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from partitions import Device

from ..admin import docs, models
from ..admin.lifecycle import ROUTERS, ServerEnd
from ..api import framework
from ..config.schema import Config
from ..control.controller import Controller
from ..device.runtime import Runtime
from ..host.exit_codes import NEEDS_RESTART
from ..host.shutdown_timer import give_up
from ..host.watchdog import Watchdog
from ..tenants.frontend import State
from ..tenants.service import Service
from . import listen, spawn
from .affinity import TOO_FEW_CORES, conflicts, share_cores
from .remote_frontend import open_remote
from .supervisor import Supervisor

log = logging.getLogger("greenlane.processes")

_DEVICE_LOST, _SIGNALLED = 0, 1


async def serve(
    config: Config,
    opener: Callable[[Config], Device],
    listeners: Sequence[socket.socket],
    own: Mapping[str, Sequence[socket.socket]],
    abandon: Callable[[int], object] = os._exit,
    cores: Callable[[int], Iterable[int]] = os.sched_getaffinity,
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain. Returns the exit status.

    `abandon` ends the process with a status. It is called on a second signal, with GAVE_UP if requests were unanswered.
    `cores` returns the host's cores that a process may run on. Where the device sets none aside for the tenants, they are
    shared out among this process and the HTTP processes, and this process runs on its share of them from then on.
    """
    signalled = _catch_signals()
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Processes that start now end with this one, not with the terminal.
    async with Watchdog(config.server):
        await asyncio.to_thread(spawn.prepare)
        if hang_up != signal.SIG_IGN:  # Under nohup it is ignored.
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, signalled.set)
        service = Service(config, [])
        frontends = {name: open_remote(tenant) for name, tenant in config.tenants.items()}

        def set_state(state: State) -> None:
            service.set_state(state)
            supervisor.set_state(state)

        controller = Controller(config, frontends, set_state)
        on_state, device = partial(controller.on_state, tuple(frontends)), await asyncio.to_thread(opener, config)
        runtime = Runtime(config, device, frontends, on_state, controller.on_lost)
        controller.add(dict.fromkeys(frontends, runtime))
        docs.document()
        application = framework.build((models.forwarded, *ROUTERS), service=lambda: service, controller=lambda: controller)
        supervisor = Supervisor(config, frontends, listeners, own, application, runtime.replace_link)
        try:
            await _start(supervisor, controller)
            _set_affinity(config, supervisor, runtime, cores(0))
            log.info("listening on %s", ", ".join(map(listen.url, chain(listeners, *own.values()))))
            return await _run_until_end(signalled, supervisor, controller, abandon)
        finally:
            supervisor.kill()


async def _start(supervisor: Supervisor, controller: Controller) -> None:
    """Start processes and devices at the same time."""
    starting = asyncio.create_task(supervisor.start())
    try:
        await controller.start()
    finally:
        await starting


def _set_affinity(config: Config, supervisor: Supervisor, runtime: Runtime, allowed: Iterable[int]) -> None:
    """Keep HTTP off this process's cores, unless partitions are of cores or the configuration allows any core."""
    configured = {name: tenant.front_cores for name, tenant in config.tenants.items()}
    partitions = {name: partition.host_cores or () for name, partition in runtime.manager.held.items()}
    for line in conflicts(configured, partitions):
        log.warning("%s", line)
    if any(partitions.values()) or config.server.front_cores == "any":
        return
    if affinity := share_cores(allowed, configured):
        supervisor.set_affinity(affinity)
        runtime.builds.set_affinity(affinity.others)
        spawn.set_own_affinity(affinity.device)
        log.info("%s", affinity)
    else:
        log.warning("%s", TOO_FEW_CORES)


async def _run_until_end(
    signalled: asyncio.Event, supervisor: Supervisor, controller: Controller, abandon: Callable[[int], object]
) -> int:
    """Wait for a signal or the loss of the device; after a signal, drain. Returns the exit status."""

    def kill(status: int) -> None:
        supervisor.kill_from_any_thread()
        abandon(status)

    async def shut_down() -> None:
        await end.drain()
        await supervisor.close()
        await controller.close()

    end = ServerEnd(controller, kill)
    try:
        if await _first(end.device_lost(), signalled.wait()) == _DEVICE_LOST:
            return NEEDS_RESTART
        signalled.clear()
        first = await _first(end.device_lost(), signalled.wait(), shut_down())
        if first == _SIGNALLED:
            status = give_up(await _unanswered(controller))
            supervisor.kill()
            abandon(status)
            return status
        return NEEDS_RESTART if first == _DEVICE_LOST else 0
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


def _catch_signals() -> asyncio.Event:
    """An event that is set by SIGTERM and SIGINT."""
    signalled, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    return signalled
