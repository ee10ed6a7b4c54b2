"""The supervisor of a server whose tenants and devices have processes of their own: from a configuration to an exit status."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from ..admin import docs, models
from ..admin.lifecycle import ROUTERS, ServerEnd
from ..api import framework
from ..api.audited import audited
from ..config.schema import Config
from ..config.section import ConfigError
from ..control.controller import Controller
from ..control.reload import ReadConfig, Reloader, without_file
from ..control.watcher import Watcher
from ..host.shutdown_timer import give_up
from ..host.signals import Terminal
from ..host.watchdog import Watchdog
from ..tenants.frontend import State
from ..tenants.lending import open_pages
from ..tenants.service import Service
from . import device_process, listen, process_counts, spawn, tenant_process
from .affinity import TOO_FEW_CORES, conflicts, share_cores
from .device_process import DeviceArguments
from .linked_frontend import LinkedFrontend
from .remote_frontend import RemoteFrontend, open_remote
from .remote_runtime import RemoteRuntime
from .runtime_server import Opener
from .spread_frontend import DeviceSides, SpreadFrontend, open_spread
from .supervised import HostedRuntime, SupervisedDevice
from .supervisor import Supervisor
from .tenant_process import TenantArguments
from .tenant_processes import TenantProcesses
from .transfer import TenantTransfers

log = logging.getLogger("greenlane.processes")


async def serve(
    config: Config,
    opener: Opener,
    listeners: Sequence[socket.socket],
    own: Mapping[str, Sequence[socket.socket]],
    abandon: Callable[[int], object] = os._exit,
    cores: Callable[[int], Iterable[int]] = os.sched_getaffinity,
    hosted: Collection[str] = (),
    read: ReadConfig = without_file,
) -> int:
    """Serve until SIGTERM, SIGINT or the SIGHUP of a terminal that closes, then drain. Returns the exit status.

    Any other SIGHUP reloads the configuration, which `read` reads again.

    `opener` opens the device of a configuration with one, in the process that has it; it is sent there, so it is a function of
    a module. `hosted` are the devices that are cores of this host: each tenant's own process has the tenant's device side.
    `abandon` ends this process with a status. It is called on a second signal, with GAVE_UP if requests were unanswered.
    `cores` returns the host's cores that a process may run on. Those that no device sets aside for tenants are shared out among
    the device processes and the HTTP processes. Raises ConfigError or PartitionError for a configuration that cannot be served.
    """
    signalled = _catch_signals()
    terminal = Terminal()
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Processes that start now end with this one, not with the terminal.
    async with Watchdog(config.server):
        await asyncio.to_thread(spawn.prepare)
        if problems := config.spread_problems(hosted):
            raise ConfigError(problems)
        counts = process_counts.count(config, hosted, len(frozenset(cores(0))))
        service = Service(config, [])
        on_cores = {tenant for device in hosted for tenant in config.tenants_on(device)}
        frontends: dict[str, RemoteFrontend] = {}
        for name, tenant in config.tenants.items():
            on = config.devices_of(name)
            frontends[name] = open_spread(tenant, on) if len(on) > 1 else open_remote(tenant, name not in on_cores)

        def set_state(state: State) -> None:
            service.set_state(state)
            supervisor.set_state(state)

        def set_log_level(level: str) -> None:
            supervisor.set_log_level(level)

        async def on_relinked(name: str, free: Callable[[], None]) -> None:
            async with transfers.locks[name]:
                await asyncio.gather(*(each.replace_link(name) for each in spread.get(name, [runtimes[name]])))
            free()

        runtimes: dict[str, RemoteRuntime] = {}
        transfers = TenantTransfers(runtimes, frontends, config.server.max_pause)
        controller = Controller(config, frontends, set_state, transfers.transfer)
        devices, in_tenants = _devices(config, opener, frontends, controller, hosted)
        runtimes |= {name: hosted.runtime for name, hosted in in_tenants.items()}
        runtimes |= {name: device.runtime for device in devices for name in device.runtime.frontends}
        spread = {
            name: [each.runtime for each in devices if name in each.runtime.frontends]
            for name, frontend in frontends.items()
            if frontend.spread
        }
        for name, frontend in frontends.items():
            frontend.open(DeviceSides(spread[name]) if name in spread else runtimes[name])
        docs.document()

        async def reconfigure(config: Config) -> None:
            service.reconfigure(config)
            await supervisor.reconfigure(config)

        reloader = Reloader(controller, read, reconfigure)
        if hang_up != signal.SIG_IGN:  # Under nohup it is ignored.
            on_hang_up = partial(_hang_up, terminal, signalled, reloader)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hang_up)
        routers = (models.forwarded, *ROUTERS)
        application = framework.build(
            routers,
            service=lambda: service,
            controller=lambda: controller,
            reloader=lambda: reloader,
            set_log_level=set_log_level,
        )
        pages = open_pages(config, counts)
        supervisor = Supervisor(
            config,
            frontends,
            listeners,
            own,
            audited(application),
            on_relinked,
            devices,
            in_tenants,
            pages,
            counts,
            controller.restarts,
        )
        with_process = {each.name: each.runtime for each in devices}
        controller.tenant_host = TenantProcesses(
            supervisor,
            frontends,
            runtimes,
            transfers.locks,
            with_process,
            hosted,
            partial(_hosted, opener),
            controller.on_state,
            len(frozenset(cores(0))),
        )
        try:
            async with Watcher(controller):
                await _start(supervisor, controller)
                _set_affinity(config, supervisor, controller, devices, cores(0), counts)
                log.info("listening on %s", ", ".join(map(listen.url, chain(listeners, *own.values()))))
                return await _run_until_end(signalled, supervisor, controller, abandon)
        finally:
            supervisor.kill()


def _devices(
    config: Config,
    opener: Opener,
    frontends: Mapping[str, RemoteFrontend],
    controller: Controller,
    hosted: Collection[str],
) -> tuple[list[SupervisedDevice], dict[str, HostedRuntime]]:
    """Add every device to the controller. Returns the device processes, and the device sides in tenants' own processes."""
    processes: list[SupervisedDevice] = []
    in_tenants: dict[str, HostedRuntime] = {}
    for device in config.named_devices:
        on_state = partial(controller.on_state, device=device)
        if device in hosted:
            sides = {
                name: RemoteRuntime(f"the process of {name}", {name: frontends[name]}, on_state)
                for name in config.tenants_on(device)
            }
            in_tenants |= {name: _hosted(opener, side, device) for name, side in sides.items()}
            controller.add(sides, device)
        else:
            label = f"the process of device {device}" if len(config.named_devices) > 1 else "the device process"
            theirs = {name: _part(frontends[name], device) for name in config.tenants_on(device)}
            runtime = RemoteRuntime(label, theirs, on_state)
            arguments = partial(_device_arguments, controller, device, opener)
            processes.append(SupervisedDevice(device, runtime, device_process.main, arguments))
            controller.add(dict.fromkeys(theirs, runtime), device, runtime)
    return processes, in_tenants


def _hosted(opener: Opener, side: RemoteRuntime, device: str) -> HostedRuntime:
    """What starts the process of a tenant with this device side."""
    return HostedRuntime(side, tenant_process.main, partial(TenantArguments, device=device, opener=opener))


def _device_arguments(controller: Controller, device: str, opener: Opener, *ends: Any) -> DeviceArguments:
    """The arguments of a process of this device that starts now."""
    return DeviceArguments(device, controller.config.on_device(device), opener, *ends)


def _part(frontend: RemoteFrontend, device: str) -> LinkedFrontend:
    """A tenant's frontend as this device is to see it."""
    return frontend.members[device] if isinstance(frontend, SpreadFrontend) else frontend


async def _start(supervisor: Supervisor, controller: Controller) -> None:
    """Start processes and devices at the same time."""
    starting, opening = asyncio.create_task(supervisor.start()), asyncio.create_task(controller.start())
    await asyncio.wait({starting, opening}, return_when=asyncio.FIRST_EXCEPTION)
    if starting.done() and starting.exception():
        opening.cancel()  # It waits for processes, of which there may be none.
    for found in await asyncio.gather(starting, opening, return_exceptions=True):
        if found:
            raise found


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
    if affinity := share_cores(set(allowed).difference(*reserved.values()), left, [each.name for each in devices], counts):
        supervisor.set_affinity(affinity)
        for each in devices:
            each.runtime.set_affinity(affinity.devices[each.name], affinity.others)
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
