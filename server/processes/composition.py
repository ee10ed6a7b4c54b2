"""The parts of a server whose tenants and devices have processes of their own, made and connected. Nothing here starts them."""

import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..admin import docs, models
from ..admin.lifecycle import ROUTERS
from ..api import framework
from ..api.framework import audited
from ..config.schema import Config
from ..config.tenant import TenantConfig
from ..control.controller import Controller
from ..control.reconfiguration import reconfigure
from ..control.reload import ReadConfig, Reloader
from ..link.activity import open_pages
from ..observing.observers import Observers
from ..tenants.frontend import State
from ..tenants.service import Service
from . import tenant_process
from .device_side import device_process
from .device_side.device_process import DeviceArguments
from .device_side.runtime_server import Opener
from .remote.remote_frontend import RemoteFrontend, open_remote
from .remote.remote_runtime import RemoteRuntime
from .supervision import affinity
from .supervision.mps_group import MpsGroup, memory_limit
from .supervision.supervised import HostedRuntime, SupervisedDevice
from .supervision.supervisor import Supervisor
from .supervision.tenant_processes import DeviceHomes, TenantProcesses, TenantSides, TenantTransfers
from .tenant_process import TenantArguments


class Composition:
    """The supervisor's process: what it has, in the order in which one part needs another.

    `groups` are the processes under MPS, by device. `cores` is the number of the host's cores that the server may use; the
    other arguments are as those of `serve`. A tenant has a frontend here for its HTTP process, and a runtime for its device
    side, whichever process has that. All methods belong to the event loop's thread. Raises ConfigError.
    """

    def __init__(
        self,
        config: Config,
        opener: Opener,
        hosted: Collection[str],
        groups: Mapping[str, MpsGroup],
        cores: int,
        listeners: Sequence[socket.socket],
        own: Mapping[str, Sequence[socket.socket]],
        read: ReadConfig,
    ) -> None:
        self._service = Service(config, [])
        frontends = _open_frontends(config, hosted)
        self._tenants: dict[str, TenantSides] = {}
        transfers = TenantTransfers(self._tenants, self._find_home, self._leave_home, lambda: self.controller.config)
        self.counts = affinity.count(config, hosted, cores)
        self.controller = Controller(config, frontends, self._set_state, transfers.transfer)
        self._observers = Observers(self.controller)
        self.controller.on_progress = partial(self._set_state, "starting")
        self._opener = opener
        self._groups = groups
        self.devices, in_tenants = self._add_devices(config, opener, hosted, frontends)
        self._connect(in_tenants)
        self.reloader = Reloader(self.controller, read, partial(reconfigure, self.controller, everywhere=self._reconfigure))
        self.supervisor = Supervisor(
            config,
            frontends,
            listeners,
            own,
            self._application(),
            self._replace_link,
            self.devices,
            in_tenants,
            open_pages(config.tenants, self.counts, in_tenants),
            self.counts,
            self.controller.restarts,
            self.controller.refused_connections,
        )
        shared = {each.name: each.runtime for each in self.devices if each.group is None}
        apart = [each for each in self.devices if each.group]
        self._homes = DeviceHomes(
            self.supervisor.devices, shared, apart, lambda device, tenant: self._device_process(device, {}, tenant)
        )
        self.controller.tenant_host = TenantProcesses(
            self.supervisor.http, self._tenants, self._homes, hosted, partial(_hosted, opener), self.controller.on_state, cores
        )

    def _add_devices(
        self, config: Config, opener: Opener, hosted: Collection[str], frontends: Mapping[str, RemoteFrontend]
    ) -> tuple[list[SupervisedDevice], dict[str, HostedRuntime]]:
        """Add every device to the controller. Returns the device processes, and the device sides in tenants' own processes."""
        processes: list[SupervisedDevice] = []
        in_tenants: dict[str, HostedRuntime] = {}
        for device in config.named_devices:
            on_state = partial(self.controller.on_state, device=device)
            theirs = {name: frontends[name] for name in config.tenants_on(device)}
            if device in hosted:
                sides = {
                    name: RemoteRuntime(f"the process of {name}", {name: frontend}, on_state, self.controller.on_loading)
                    for name, frontend in theirs.items()
                }
                in_tenants |= {name: _hosted(opener, side, device) for name, side in sides.items()}
                self.controller.add(sides, device, adopts=False)
            elif device in self._groups:
                apart = {
                    name: self._device_process(device, {name: frontend}, config.tenants[name])
                    for name, frontend in theirs.items()
                }
                processes += apart.values()
                self.controller.add({name: each.runtime for name, each in apart.items()}, device)
            else:
                process = self._device_process(device, theirs)
                processes.append(process)
                self.controller.add(dict.fromkeys(theirs, process.runtime), device, process.runtime)
        return processes, in_tenants

    async def _find_home(self, device: str, tenant: str) -> RemoteRuntime:
        return await self._homes.find(device, self.controller.tenants[tenant])

    async def _leave_home(self, runtime: RemoteRuntime) -> None:
        """A tenant has left this runtime, whose process may end: what it has used since the last report counts as well."""
        for device in self.controller.devices:
            if runtime in device.runtimes.values():
                await self.controller.leaving(device, runtime)
        await self._homes.leave(runtime)

    def _device_process(
        self, device: str, frontends: Mapping[str, RemoteFrontend], tenant: TenantConfig | None = None
    ) -> SupervisedDevice:
        """A process of a device that is to be started: for these tenants, or for one alone."""
        label = f"the process of device {device}" if len(self.controller.config.named_devices) > 1 else "the device process"
        runtime = RemoteRuntime(
            f"{label} for {tenant.name}" if tenant else label,
            frontends,
            partial(self.controller.on_state, device=device),
            self.controller.on_loading,
        )
        arguments = partial(_device_arguments, device, tenant, self._opener)
        name = f"{device}, {tenant.name}" if tenant else device
        return SupervisedDevice(name, runtime, device_process.main, arguments, self._groups.get(device))

    def _connect(self, in_tenants: Mapping[str, HostedRuntime]) -> None:
        """Give every frontend its device side."""
        for runtime in [*(hosted.runtime for hosted in in_tenants.values()), *(device.runtime for device in self.devices)]:
            for name, frontend in runtime.frontends.items():
                self._tenants[name] = TenantSides(frontend, runtime)
                frontend.open(runtime)

    def _application(self) -> Any:
        """What answers in this process: the admin API and the status page, with an audit."""
        docs.document()
        return audited(
            framework.build(
                (models.forwarded, *ROUTERS),
                service=lambda: self._service,
                controller=lambda: self.controller,
                observers=lambda: self._observers,
                reloader=lambda: self.reloader,
                set_log_level=lambda level: self.supervisor.set_log_level(level),
            )
        )

    def _set_state(self, state: State, progress: str = "") -> None:
        self._service.set_state(state, progress)
        self.supervisor.set_state(state, progress)

    async def _reconfigure(self, config: Config) -> None:
        self._service.reconfigure(config)
        await self.supervisor.reconfigure(config)

    async def _replace_link(self, tenant: str, free: Callable[[], None]) -> None:
        """A tenant's HTTP process has a new link: have its device side use it, then free the old one."""
        sides = self._tenants[tenant]
        async with sides.link:
            await sides.runtime.handover.replace_link(tenant)
        free()


def _open_frontends(config: Config, hosted: Iterable[str]) -> dict[str, RemoteFrontend]:
    """A frontend for each tenant; `hosted` are the devices of which a tenant's own process has the tenant's device side."""
    on_cores = {tenant for device in hosted for tenant in config.tenants_on(device)}
    return {name: open_remote(tenant, name not in on_cores) for name, tenant in config.tenants.items()}


def _hosted(opener: Opener, side: RemoteRuntime, device: str) -> HostedRuntime:
    """What starts the process of a tenant with this device side."""
    return HostedRuntime(side, tenant_process.main, partial(TenantArguments, device=device, opener=opener))


def _device_arguments(device: str, tenant: TenantConfig | None, opener: Opener, config: Config, *ends: Any) -> DeviceArguments:
    """The arguments of a process of this device that starts now: for this tenant alone, under MPS, or for all of the device."""
    own = config.on_device(device)
    if tenant is None:
        return DeviceArguments(device, own, opener, *ends)
    own = own.with_devices({device: own.device.model_copy(update={"index": 0})})  # It is the only GPU that the process sees.
    arguments = DeviceArguments(tenant.name, own, opener, *ends)
    return replace(
        arguments, environment={**arguments.environment, **memory_limit(tenant.device_memory, tenant.burst is not None)}
    )
