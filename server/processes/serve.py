"""The supervisor of a server whose tenants and devices have processes of their own: from a configuration to an exit status."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from ..admin import docs, models
from ..admin.lifecycle import ROUTERS, ServerEnd
from ..api import framework
from ..config.schema import Config
from ..control.controller import Controller
from ..host.shutdown_timer import give_up
from ..host.watchdog import Watchdog
from ..tenants.frontend import State
from ..tenants.service import Service
from . import device_process, listen, spawn, tenant_process
from .affinity import TOO_FEW_CORES, conflicts, share_cores
from .device_process import DeviceArguments
from .remote_frontend import RemoteFrontend, open_remote
from .remote_runtime import RemoteRuntime
from .runtime_server import Opener
from .supervised import HostedRuntime, SupervisedDevice
from .supervisor import Supervisor
from .tenant_process import TenantArguments

log = logging.getLogger("greenlane.processes")


async def serve(
    config: Config,
    opener: Opener,
    listeners: Sequence[socket.socket],
    own: Mapping[str, Sequence[socket.socket]],
    abandon: Callable[[int], object] = os._exit,
    cores: Callable[[int], Iterable[int]] = os.sched_getaffinity,
    hosted: bool = False,
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain. Returns the exit status.

    `opener` opens the device in the process that has it; it is sent there, so it is a function of a module. `hosted`: the
    device is cores of this host, and each tenant's own process has the tenant's device side. `abandon` ends this process with
    a status. It is called on a second signal, with GAVE_UP if requests were unanswered. `cores` returns the host's cores that a
    process may run on. Where the device sets none aside for the tenants, they are shared out among the device process and the
    HTTP processes. Raises ConfigError or PartitionError for a configuration that cannot be served.
    """
    signalled = _catch_signals()
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Processes that start now end with this one, not with the terminal.
    async with Watchdog(config.server):
        await asyncio.to_thread(spawn.prepare)
        if hang_up != signal.SIG_IGN:  # Under nohup it is ignored.
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, signalled.set)
        service = Service(config, [])
        frontends = {name: open_remote(tenant, not hosted) for name, tenant in config.tenants.items()}

        def set_state(state: State) -> None:
            service.set_state(state)
            supervisor.set_state(state)

        async def on_relinked(name: str, free: Callable[[], None]) -> None:
            await runtimes[name].replace_link(name)
            free()

        controller = Controller(config, frontends, set_state)
        runtimes = _runtimes(frontends, controller, hosted)
        controller.add(runtimes)
        docs.document()
        application = framework.build((models.forwarded, *ROUTERS), service=lambda: service, controller=lambda: controller)
        devices, in_tenants = _processes(config, opener, runtimes, hosted)
        supervisor = Supervisor(config, frontends, listeners, own, application, on_relinked, devices, in_tenants)
        try:
            await _start(supervisor, controller)
            _set_affinity(config, supervisor, controller, runtimes, cores(0))
            log.info("listening on %s", ", ".join(map(listen.url, chain(listeners, *own.values()))))
            return await _run_until_end(signalled, supervisor, controller, abandon)
        finally:
            supervisor.kill()


def _runtimes(frontends: Mapping[str, RemoteFrontend], controller: Controller, hosted: bool) -> dict[str, RemoteRuntime]:
    """The device side of each tenant: one for all, or one in each tenant's process."""
    if hosted:
        runtimes = {
            name: RemoteRuntime(f"the process of {name}", {name: frontend}, controller.on_state)
            for name, frontend in frontends.items()
        }
    else:
        runtimes = dict.fromkeys(frontends, RemoteRuntime("the device process", frontends, controller.on_state))
    for name, frontend in frontends.items():
        frontend.open(runtimes[name])
    return runtimes


def _processes(
    config: Config, opener: Opener, runtimes: Mapping[str, RemoteRuntime], hosted: bool
) -> tuple[list[SupervisedDevice], dict[str, HostedRuntime]]:
    """How the process of each device side is started: device processes, or tenants' own."""
    if hosted:
        make = partial(TenantArguments, opener=opener)
        return [], {name: HostedRuntime(runtime, tenant_process.main, make) for name, runtime in runtimes.items()}
    distinct = {id(runtime): runtime for runtime in runtimes.values()}.values()
    return [
        SupervisedDevice(str(index), runtime, device_process.main, partial(DeviceArguments, str(index), config, opener))
        for index, runtime in enumerate(distinct)
    ], {}


async def _start(supervisor: Supervisor, controller: Controller) -> None:
    """Start processes and devices at the same time."""
    starting = asyncio.create_task(supervisor.start())
    try:
        await controller.start()
    finally:
        await starting


def _set_affinity(
    config: Config,
    supervisor: Supervisor,
    controller: Controller,
    runtimes: Mapping[str, RemoteRuntime],
    allowed: Iterable[int],
) -> None:
    """Keep HTTP off the device process's cores, unless partitions are of cores or the configuration allows any core."""
    configured = {name: tenant.front_cores for name, tenant in config.tenants.items()}
    reserved = {name: cores or () for device in controller.devices for name, cores in device.host_cores.items()}
    for line in conflicts(configured, reserved):
        log.warning("%s", line)
    if any(reserved.values()) or config.server.front_cores == "any":
        return
    if affinity := share_cores(allowed, configured):
        supervisor.set_affinity(affinity)
        for runtime in runtimes.values():
            runtime.set_affinity(affinity.device, affinity.others)
        spawn.set_own_affinity(affinity.others)
        log.info("%s", affinity)
    else:
        log.warning("%s", TOO_FEW_CORES)


async def _run_until_end(
    signalled: asyncio.Event, supervisor: Supervisor, controller: Controller, abandon: Callable[[int], object]
) -> int:
    """Wait for a signal, then drain. Returns the exit status."""

    def kill(status: int) -> None:
        supervisor.kill_from_any_thread()
        abandon(status)

    async def shut_down() -> None:
        await end.drain()
        await supervisor.close()
        await controller.close()

    end = ServerEnd(controller, kill)
    try:
        await signalled.wait()
        signalled.clear()
        if await _first(shut_down(), signalled.wait()):
            status = give_up(await _unanswered(controller))
            supervisor.kill()
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


def _catch_signals() -> asyncio.Event:
    """An event that is set by SIGTERM and SIGINT."""
    signalled, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    return signalled
