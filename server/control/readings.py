"""What all devices report now, put together: how models run, and what they take of memory."""

from collections.abc import Sequence

from .controlled_device import ControlledDevice
from .descriptions import Execution, TenantMemory, on_both
from .together import together


async def executions(devices: Sequence[ControlledDevice]) -> list[Execution]:
    """How each model runs, one entry a version, also of a tenant on several devices."""
    found = await together(runtime.models.executions() for device in devices for runtime in device.distinct())
    by_version: dict[tuple[str, str, str], Execution] = {}
    for each in (execution for executions in found for execution in executions):
        key = each.tenant, each.name, each.version
        by_version[key] = on_both(by_version[key], each) if key in by_version else each
    return list(by_version.values())


async def memory_on(devices: Sequence[ControlledDevice]) -> dict[str, dict[str, TenantMemory]]:
    """What each tenant's models take of each device's memory, by device and tenant."""
    found = await together(together(runtime.models.memory() for runtime in device.distinct()) for device in devices)
    return {
        device.name: {each.tenant: each for memory in memories for each in memory if each.tenant in device.runtimes}
        for device, memories in zip(devices, found, strict=True)
    }


async def memory(devices: Sequence[ControlledDevice]) -> dict[str, TenantMemory]:
    """The same by tenant, the sums over its devices."""
    by_tenant: dict[str, TenantMemory] = {}
    for on_device in (await memory_on(devices)).values():
        for name, each in on_device.items():
            by_tenant[name] = by_tenant[name].plus(each) if name in by_tenant else each
    return by_tenant
