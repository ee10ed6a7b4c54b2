"""Which device process serves a tenant that comes to a device: the one of all its tenants, or one of the tenant's own."""

from collections.abc import Callable, Collection, Mapping

from ...config.tenant import TenantConfig
from ..remote.remote_runtime import RemoteRuntime
from .supervised import SupervisedDevice
from .supervised_devices import SupervisedDevices

Make = Callable[[str, TenantConfig], SupervisedDevice]
"""Makes the process of a device for a tenant that comes, without tenants yet; it is not started."""


class DeviceHomes:
    """Belongs to the supervisor's event loop.

    `shared` are the runtimes of devices whose tenants share a process, by device. `apart` are the device processes that have
    one tenant each, and `make` makes another one.
    """

    def __init__(
        self, devices: SupervisedDevices, shared: Mapping[str, RemoteRuntime], apart: Collection[SupervisedDevice], make: Make
    ) -> None:
        self._devices = devices
        self._shared = shared
        self._apart = {each.runtime: each for each in apart}
        self._make = make

    def has(self, runtime: RemoteRuntime) -> bool:
        """Whether this is a device process's, and not that of a tenant's own process on cores of the host."""
        return runtime in self._apart or runtime in self._shared.values()

    def open_page(self, tenant: str, processes: int) -> None:
        """As `SupervisedDevices.open_page`."""
        self._devices.open_page(tenant, processes)

    def close_page(self, tenant: str) -> None:
        """As `SupervisedDevices.close_page`."""
        self._devices.close_page(tenant)

    async def find(self, device: str, tenant: TenantConfig) -> RemoteRuntime:
        """The runtime for a tenant that comes to this device. Starts a process where tenants have their own.

        `leave` it when the tenant has gone, or has not come after all. Raises OSError, EOFError, or as `RemoteRuntime.open`.
        """
        if device in self._shared:
            return self._shared[device]
        each = self._make(device, tenant)
        self._apart[each.runtime] = each
        try:
            await self._devices.begin(each)
            await each.runtime.open()
            self._share_cores(each)
            await each.runtime.start({})
        except BaseException:
            await self.leave(each.runtime)
            raise
        return each.runtime

    async def leave(self, runtime: RemoteRuntime) -> None:
        """A tenant has left this runtime: end its process if that was the tenant's own."""
        if each := self._apart.pop(runtime, None):
            await self._devices.end(each)

    def _share_cores(self, each: SupervisedDevice) -> None:
        """Restrict a process that comes to the cores of the others of its device."""
        beside = [one.runtime.kept.affinity for one in self._apart.values() if one.device == each.device]
        if known := [affinity for affinity in beside if affinity]:
            all_cores, builds = (frozenset[int]().union(*cores) for cores in zip(*known, strict=True))
            each.runtime.set_affinity(all_cores, builds, starting=builds)
