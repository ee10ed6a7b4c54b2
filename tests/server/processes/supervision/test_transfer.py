"""A tenant that moves to another device process, with the test at the other end of each channel."""

import asyncio
from pathlib import Path

from server.config.schema import Config, ModelsConfig
from server.config.tenant import TenantConfig
from server.control.descriptions import AS_CONFIGURED
from server.processes.remote.remote_frontend import open_remote
from server.processes.remote.remote_runtime import RemoteRuntime
from server.processes.supervision.transfer import TenantTransfers

from ..remote.test_remote_frontend import Process as HttpProcess
from ..remote.test_remote_runtime import Process, served, until_resumed

ACME = TenantConfig(name="acme", granules=1, models=("*",), memory=1 << 20)


async def test_a_device_whose_process_was_replaced_as_a_tenant_came_is_started_with_it() -> None:
    """The new process serves, and has never heard of the tenant: nothing would read its link."""
    frontend, clients = open_remote(ACME), HttpProcess()
    source = RemoteRuntime("the device process", {"acme": frontend}, lambda *_: None)
    target = RemoteRuntime("the device process", {}, lambda *_: None)
    first, second = await served(source), Process()
    await second.start(target)
    await target.open()
    await target.start({})
    channel = await clients.meet(frontend)
    relinking = clients.gates["relink"] = asyncio.Event()
    clients.answers["relink"] = True
    runtimes = {"acme": source}

    async def find(device: str, tenant: str) -> RemoteRuntime:
        return target

    async def leave(runtime: RemoteRuntime) -> None:
        assert runtime is source

    config = Config(models=ModelsConfig(repository=Path()), tenants={"acme": ACME}, source="test")
    transfers = TenantTransfers(runtimes, {"acme": frontend}, find, leave, config)
    moving = asyncio.create_task(transfers.transfer("acme", source, "1", (3,)))
    await clients.hears("relink")
    await second.end(target)
    third = Process()
    await third.start(target)
    await until_resumed(target)
    assert not target.away
    relinking.set()
    assert await asyncio.wait_for(moving, 10) is target
    assert runtimes["acme"] is target
    await asyncio.wait_for(third.supervisors.closed.wait(), 10)
    await third.end(target)
    fourth = Process()
    await fourth.start(target)
    assert fourth.heard[1] == ("start", {"acme": (3,)}, {}, AS_CONFIGURED)
    await until_resumed(target)
    for each in (first, fourth, clients, channel, frontend):
        each.close()
