"""A tenant that moves to another device process, with the test at the other end of each channel."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from partitions import DeviceUnavailable
from partitions.errors import MpsError
from server.config.schema import Config, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from server.control.descriptions import AS_CONFIGURED
from server.errors import Conflict, Unavailable
from server.processes.remote.remote_frontend import open_remote
from server.processes.remote.remote_runtime import RemoteRuntime
from server.processes.supervision.tenant_processes import TenantSides, TenantTransfers
from server.tenants.frontend import HttpSide
from tests.fakes import PATIENCE

from ..remote.test_remote_frontend import Process as HttpProcess
from ..remote.test_remote_runtime import Process, model, served

ACME = TenantConfig(name="acme", granules=1, models=("*",), memory=1 << 20)


class Site:
    """A tenant, of whose HTTP process the test has the other end, as of the processes of two devices.

    The process `first` of `source` serves it, and `second` is that of `target`.
    """

    def __init__(self) -> None:
        self.frontend, self.clients = open_remote(ACME), HttpProcess()
        self.source = RemoteRuntime("the device process", {"acme": self.frontend}, lambda *_: None)
        self.target = RemoteRuntime("the device process", {}, lambda *_: None)
        self.second = Process()
        self.refused: Exception | None = None
        """Why no process of the other device can be started."""
        self.relinking = self.clients.gates["relink"] = asyncio.Event()
        self.clients.answers |= {"relink": True, "page_out": True, "last_uses": {}}
        self.sides = TenantSides(self.frontend, self.source)
        server, models = ServerConfig(max_pause=0.1), ModelsConfig(repository=Path())
        config = Config(server=server, models=models, tenants={"acme": ACME}, source="test")
        self._transfers = TenantTransfers({"acme": self.sides}, self._find, self._leave, lambda: config)

    async def open(self) -> "Site":
        self.first = await served(self.source)
        await self.second.start(self.target)
        await self.target.open()
        await self.target.start({})
        self._channel = await self.clients.meet(self.frontend)
        return self

    async def transfer(self) -> None:
        assert await self._transfers.transfer("acme", self.source, "1", (3,)) is self.target
        assert self.sides.runtime is self.target

    def close(self) -> None:
        for each in (self.first, self.second, self.clients, self._channel, self.frontend):
            each.close()

    async def _find(self, device: str, tenant: str) -> RemoteRuntime:
        if self.refused:
            raise self.refused
        return self.target

    async def _leave(self, runtime: RemoteRuntime) -> None:
        assert runtime is not self.sides.runtime


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = await Site().open()
    yield site
    site.close()


async def heard(process: HttpProcess, side: HttpSide) -> None:
    """Wait until the HTTP process has heard what a device process has called before."""
    await side.page_out("nothing/1#1")
    await process.hears("page_out", "nothing/1#1")


@pytest.mark.parametrize("error", [OSError("no memory"), DeviceUnavailable("it ended"), MpsError("no folder")])
async def test_a_move_for_which_no_process_can_be_started_is_refused_with_why_and_may_be_tried_again(
    site: Site, error: Exception
) -> None:
    """Such as while the MPS daemon of that device is started again."""
    site.refused = error
    with pytest.raises(Unavailable, match=f"^tenant acme: no process of device 1 can be started: {error}; nothing was changed"):
        await site.transfer()
    site.refused = None
    assert site.sides.runtime is site.source


async def test_a_device_whose_process_was_replaced_as_a_tenant_came_is_started_with_it(site: Site) -> None:
    """The new process serves, and has never heard of the tenant: nothing would read its link."""
    moving = asyncio.create_task(site.transfer())
    await site.clients.hears("relink")
    await site.second.end(site.target)
    third = Process()
    await third.start(site.target)
    await site.target.resumed(10)
    assert not site.target.away
    site.relinking.set()
    await asyncio.wait_for(moving, 10)
    await asyncio.wait_for(third.supervisors.closed.wait(), 10)
    await third.end(site.target)
    fourth = Process()
    await fourth.start(site.target)
    assert fourth.heard[1] == ("start", {"acme": (3,)}, {}, AS_CONFIGURED._replace(again=True))
    await site.target.resumed(10)
    fourth.close()


async def test_what_a_device_says_of_a_tenant_before_it_has_it_holds_from_then_on(site: Site) -> None:
    """It has loaded two models, one of which had to make room for the other. A third one comes while the link is changed."""
    adopting = site.second.gates["adopt"] = asyncio.Event()
    moving = asyncio.create_task(site.transfer())
    await site.second.hears("adopt")
    for name in ("paged", "back"):
        await site.second.acme.publish(name, [model(name)], [])
        await site.second.acme.page_out(f"{name}/1#1")
    adopting.set()
    await site.clients.hears("relink")
    site.second.acme.page_in("back/1#1")
    await site.second.acme.publish("late", [model("late")], [])
    site.second.acme.suspend("its worker is being restarted")
    await site.second.acme.page_out("late/1#1")
    assert site.clients.of("publish") == []
    site.relinking.set()
    await asyncio.wait_for(moving, 10)
    assert [name for name, *_ in site.clients.of("publish")] == ["paged", "back", "late"]
    assert site.clients.of("page_out") == [("paged/1#1",), ("late/1#1",)]
    assert site.clients.of("follow")[-1][0].suspended == "its worker is being restarted"
    site.second.acme.page_in("late/1#1")
    another = HttpProcess()
    another.answers["page_out"] = True
    site.frontend.renew()()
    channel = await another.meet(site.frontend)
    assert another.of("page_out") == [("paged/1#1",)]
    for each in (another, channel):
        each.close()


async def test_a_tenant_that_its_device_had_suspended_is_served_where_it_moves(site: Site) -> None:
    """The device that it leaves says no more that its worker has been restarted."""
    site.first.acme.suspend("its worker is being restarted")
    await heard(site.clients, site.first.acme)
    assert site.frontend.refusing
    site.relinking.set()
    await asyncio.wait_for(site.transfer(), 10)
    assert site.frontend.refusing == site.clients.of("follow")[-1][0].suspended == ""


async def test_what_is_brought_back_while_a_tenant_was_to_leave_is_not_paged_out_if_it_stays(site: Site) -> None:
    await site.first.acme.publish("m", [model("m")], [])
    await site.first.acme.page_out("m/1#1")
    site.clients.answers["relink"] = False
    adopting = site.second.gates["adopt"] = asyncio.Event()
    moving = asyncio.create_task(site.transfer())
    await site.second.hears("adopt")
    await site.second.acme.publish("m", [model("m")], [])
    adopting.set()
    await site.clients.hears("relink")
    site.first.acme.page_in("m/1#1")
    assert await site.first.acme.last_uses() == {}
    site.relinking.set()
    with pytest.raises(Conflict, match="its link was not replaced"):
        await asyncio.wait_for(moving, 10)
    assert site.clients.of("page_in") == [("m/1#1",)]
    assert site.sides.runtime is site.source


async def test_models_make_room_while_a_tenant_is_to_leave_for_what_waits_to_be_answered_before(site: Site) -> None:
    site.clients.answers["last_uses"] = {"m/1#1": 7}
    moving = asyncio.create_task(site.transfer())
    await site.clients.hears("relink")
    assert await site.first.acme.last_uses() == {"m/1#1": 7}
    assert await site.first.acme.page_out("m/1#1")
    site.relinking.set()
    await asyncio.wait_for(moving, 10)


async def test_a_tenant_whose_process_ends_just_as_it_moves_stays_and_its_process_is_started(site: Site) -> None:
    """Its replacement waits for the lock of its link, which the move held, and waited for the process."""
    adopting = site.second.gates["adopt"] = asyncio.Event()
    moving = asyncio.create_task(site.transfer())
    await site.second.hears("adopt")
    free = site.frontend.renew()
    adopting.set()
    with pytest.raises(Conflict, match="its HTTP process has been starting"):
        await asyncio.wait_for(moving, PATIENCE)
    assert site.sides.runtime is site.source
    assert not site.sides.link.locked()
    free()


async def test_a_tenant_whose_process_was_replaced_stays_if_what_that_had_in_flight_does_not_end(site: Site) -> None:
    """Until then the device side has the old link. The move holds the granules of all tenants meanwhile."""
    async with site.sides.link:
        with pytest.raises(
            Conflict, match=r"^tenant acme: its HTTP process was replaced, .* after 0\.1 s \(server\.max_pause\)"
        ):
            await asyncio.wait_for(site.transfer(), PATIENCE)
    assert site.sides.runtime is site.source
    assert site.second.heard[-1] == ("release", "acme")
    site.relinking.set()
    await asyncio.wait_for(site.transfer(), PATIENCE)
