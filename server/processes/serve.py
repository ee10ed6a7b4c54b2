"""The device's process, with every tenant's HTTP in a process of its own: from a configuration to an exit status."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from partitions import Device

from ..admin import docs, models
from ..admin.lifecycle import EXIT_DELAY, ROUTERS, freeze
from ..api import framework
from ..config.schema import Config, ServerConfig
from ..device.runtime import Runtime
from ..host.exit_codes import NEEDS_RESTART
from ..host.shutdown_timer import end_in_time, give_up
from ..host.watchdog import Watchdog
from ..tenants.frontend import State
from ..tenants.service import Service
from . import listen, spawn
from .affinity import TOO_FEW, share, trespasses
from .remote_frontend import open_remote
from .supervisor import House

log = logging.getLogger("greenlane.processes")

_GONE, _TOLD = 0, 1


async def serve(
    config: Config,
    opener: Callable[[Config], Device],
    listeners: Sequence[socket.socket],
    own: Mapping[str, Sequence[socket.socket]],
    abandon: Callable[[int], object] = os._exit,
    cores: Callable[[int], Iterable[int]] = os.sched_getaffinity,
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain. Returns the exit status.

    `abandon` ends the process, with a status, when it is told a second time: what is in flight is not waited for, and where
    there is something in flight the status is GAVE_UP.
    `cores` says which of the host's a process may run on; where its device sets none aside for the tenants, this process
    shares them with those that speak HTTP, and runs on its own from then on.
    """
    told, watchdog = _signalled(), Watchdog(config.server)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # What is started now ends with this process, not with a terminal.
    watchdog.start()
    await asyncio.to_thread(spawn.prepare)
    if hang_up != signal.SIG_IGN:  # As it is under nohup.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, told.set)
    service = Service(config, [])
    desks = {name: open_remote(tenant) for name, tenant in config.tenants.items()}

    def tell(state: State) -> None:
        service.become(state)
        house.become(state)

    runtime = Runtime(config, await asyncio.to_thread(opener, config), desks, tell)
    docs.document()
    application = framework.build((models.forwarded, *ROUTERS), service=lambda: service, runtime=lambda: runtime)
    house = House(config, desks, listeners, own, application, runtime.reopen)
    try:
        await _start(house, runtime, lambda: _place(config, house, runtime, cores(0)))
        log.info("listening on %s", ", ".join(map(listen.address, chain(listeners, *own.values()))))
        freezing = asyncio.create_task(freeze(runtime))
        status = await _end(told, house, runtime, abandon)
        freezing.cancel()
        return status
    finally:
        house.kill()
        await watchdog.close()


async def _start(house: House, runtime: Runtime, place: Callable[[], None]) -> None:
    """Start both at a time, and `place` them as soon as the partitions are known, before there is more to place."""
    starting = asyncio.create_task(house.start())
    try:
        await runtime.start()
        place()
    finally:
        await starting


def _place(config: Config, house: House, runtime: Runtime, allowed: Iterable[int]) -> None:
    """Keep HTTP off the cores of this process, unless the device or the configuration says otherwise."""
    chosen = {name: tenant.front_cores for name, tenant in config.tenants.items()}
    fenced = {name: partition.host_cores or () for name, partition in runtime.manager.held.items()}
    for line in trespasses(chosen, fenced):
        log.warning("%s", line)
    if any(fenced.values()) or config.server.front_cores == "any":
        return
    if shares := share(allowed, chosen):
        house.place(shares)
        runtime.builds.place(shares.others)
        spawn.pin_threads(shares.device)
        log.info("%s", shares)
    else:
        log.warning("%s", TOO_FEW)


async def _end(told: asyncio.Event, house: House, runtime: Runtime, abandon: Callable[[int], object]) -> int:
    """Wait for the end, and make it an orderly one if that is possible and nobody is in a hurry."""
    if await _first(runtime.gone.wait(), told.wait()) == _TOLD:
        told.clear()
        _end_in_time(house, runtime.config.server, abandon)
        first = await _first(runtime.gone.wait(), told.wait(), _leave(house, runtime))
        if first == _TOLD:
            status = give_up(await _unanswered(runtime))
            house.kill()
            abandon(status)
            return status
        if first > _GONE:
            return 0
    await asyncio.sleep(EXIT_DELAY)
    return NEEDS_RESTART


async def _unanswered(runtime: Runtime) -> int:
    """Requests that tenants' processes say they hold now; of one that does not answer nothing is known. Within a second."""
    return sum(each.lane.waiting + each.lane.in_flight for _, each in await runtime.reports() if not each.age)


def _end_in_time(house: House, config: ServerConfig, abandon: Callable[[int], object]) -> None:
    def end() -> None:
        house.slay()
        abandon(0)

    end_in_time(config.drain_grace, config.drain_timeout, end)


async def _leave(house: House, runtime: Runtime) -> None:
    await runtime.drain(runtime.config.server.drain_grace)
    await house.close()
    await runtime.close()


async def _first(*waiting: Coroutine[Any, Any, Any]) -> int:
    """Which of these is done first, by its place; raises what it raised. The others are cancelled."""
    tasks = [asyncio.create_task(one) for one in waiting]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    place, first = next((place, task) for place, task in enumerate(tasks) if task.done())
    for task in tasks:
        task.cancel()
    await first
    return place


def _signalled() -> asyncio.Event:
    """Set whenever this process is told to end."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    return told
