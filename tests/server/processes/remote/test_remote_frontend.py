"""A tenant's frontend, with the test at the other end of its channel."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engines import Signature
from server.config.tenant import TenantConfig
from server.errors import Conflict, Failed
from server.link import ring as links
from server.link.messages import Ticket
from server.link.ring import Descriptors
from server.processes.channels import descriptors
from server.processes.channels.calls import proxy
from server.processes.channels.descriptors import DescriptorReceiver, DescriptorSender
from server.processes.channels.http_protocols import FromLead, ToHttpProcess, ToTenant, Wanted
from server.processes.channels.rpc import Channel
from server.processes.remote.remote_frontend import RemoteFrontend, open_remote
from server.scheduling.lane_statistics import LaneStatistics, SlotStatistics
from server.tenants.catalog import IndexEntry, ModelVersion
from server.tenants.frontend import ModelReport, Report
from server.tenants.statistics import ModelStatistics
from tests.fakes import PATIENCE

from ..recorder import Recorder

PROBLEM = IndexEntry("broken", "1", "UNAVAILABLE", "no such file")
SIGNATURE = Signature((), ())


class Process(Recorder):
    """A tenant's HTTP process."""

    def __init__(self) -> None:
        super().__init__(ToHttpProcess, answers={"publish": True})
        self.channel = Channel("the supervisor", self.handlers())
        self.links: list[Descriptors] = []
        self._ends: list[DescriptorSender | DescriptorReceiver] = []
        self._supervisors: list[Channel] = []

    def hear(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "relink":
            self.links.append(self.receiver.take_link(arguments[0]))
        return super().hear(name, arguments)

    def close(self) -> None:
        self.channel.close()
        for end in (*self._ends, *self.links):
            end.close()
        self.links = []

    def close_both_ends(self) -> None:
        """Close its channels at the supervisor, too."""
        self.close()
        for channel in self._supervisors:
            channel.close()

    async def join(self, frontend: RemoteFrontend, number: int) -> Channel:
        """Add it to a frontend as the helper of this number."""
        ours, theirs = socket.socketpair()
        channel = Channel("a helper of acme", frontend.handlers_of_helpers())
        self._supervisors.append(channel)
        await channel.open(ours)
        await self.channel.open(theirs)
        await frontend.add_helper(number, channel)
        return channel

    async def meet(self, frontend: RemoteFrontend) -> Channel:
        """Connect it to a frontend."""
        ours, theirs = socket.socketpair()
        channel = Channel("the HTTP process of acme", frontend.handlers())
        self._supervisors.append(channel)
        await channel.open(ours)
        await self.channel.open(theirs)
        sender, end = descriptors.pair()
        self.receiver = DescriptorReceiver(end)
        self._ends = [sender, self.receiver]
        await frontend.connect(channel, sender)
        await proxy(ToTenant, channel).drained()
        return channel


class Device:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        self.asked.append((tenant, slot, serial))


@pytest.fixture
async def frontend() -> AsyncIterator[RemoteFrontend]:
    frontend = open_remote(TenantConfig(name="acme", granules=1, models=("*",)))
    yield frontend
    frontend.close()


@pytest.fixture
async def process(frontend: RemoteFrontend) -> AsyncIterator[Process]:
    """One that has yet to meet the frontend."""
    process = Process()
    yield process
    process.close_both_ends()


@pytest.fixture
async def helper(frontend: RemoteFrontend) -> AsyncIterator[Process]:
    """One that has yet to join the frontend."""
    helper = Process()
    yield helper
    helper.close_both_ends()


async def test_a_new_process_is_sent_what_its_predecessors_were_sent(frontend: RemoteFrontend, process: Process) -> None:
    frontend.announce("slow")
    await frontend.publish("broken", [], [PROBLEM])
    frontend.set_cores(frozenset({0}))
    frontend.listed()
    frontend.set_state("serving")
    frontend.refuse("draining")
    await process.meet(frontend)
    wanted = Wanted("serving", "", frozenset({0}), listed=True, refused="draining")
    assert process.heard[:-1] == [
        ("follow", wanted._replace(state="starting", listed=False)),
        ("announce", "slow"),
        ("publish", "broken", [], [PROBLEM]),
        ("follow", wanted),
    ]
    process.heard.clear()
    frontend.set_state("draining")
    await frontend.publish("slow", [], [PROBLEM])
    await frontend.drained()
    followed = ("follow", wanted._replace(state="draining"))
    assert process.heard == [followed, ("publish", "slow", [], [PROBLEM]), ("drained",)]


async def test_a_new_process_is_starting_until_it_has_all_models_whatever_else_changes(
    frontend: RemoteFrontend, process: Process
) -> None:
    """Its tenant's own port takes connections by then: it would be ready, and know no model that takes long to open."""
    await frontend.publish("broken", [], [PROBLEM])
    frontend.listed()
    frontend.set_state("serving")
    opened = process.gates["publish"] = asyncio.Event()
    meeting = asyncio.create_task(process.meet(frontend))
    await process.hears("publish")
    frontend.set_cores(frozenset({0}))
    frontend.suspend("its worker failed")
    wanted = Wanted("serving", "", frozenset({0}), listed=True, suspended="its worker failed")
    while len(process.of("follow")) < 3:
        await asyncio.sleep(0)
    assert all((each.state, each.listed) == ("starting", False) for (each,) in process.of("follow"))
    opened.set()
    await meeting
    assert process.of("follow")[-1] == (wanted,)


async def test_without_a_process_calls_return_at_once(frontend: RemoteFrontend, process: Process) -> None:
    assert (await frontend.report()).index == ()
    await frontend.drained()
    await process.meet(frontend)
    counted = Report([], [PROBLEM], LaneStatistics(1, 2, 3, 4), SlotStatistics(1, 2, 3))
    process.answers["report"] = counted
    assert await frontend.report() == counted
    process.close()
    assert isinstance(await frontend.report(), Report)


async def test_the_last_report_is_returned_when_the_process_does_not_answer(
    frontend: RemoteFrontend, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    await process.meet(frontend)
    counted = Report([], [PROBLEM], LaneStatistics(1, 2, 3, 4), SlotStatistics(1, 2, 3))
    process.answers["report"] = counted
    assert (await frontend.report()).age == 0
    monkeypatch.setattr("server.processes.remote.http_processes.REPORT_TIMEOUT", 0.01)
    process.answers["report"] = never = asyncio.sleep(600)
    stale = await frontend.report()
    assert (stale.index, stale.lane, stale.age > 0) == (counted.index, counted.lane, True)
    process.close()
    assert (await frontend.report()).index == counted.index, "nor where it is gone"
    never.close()


async def test_a_helper_gets_what_the_lead_got_and_reports_are_added_up(
    frontend: RemoteFrontend, process: Process, helper: Process
) -> None:
    await process.meet(frontend)
    await frontend.publish("broken", [], [PROBLEM])
    await helper.join(frontend, 2)
    frontend.suspend("the device is away")
    frontend.fail_in_flight("it has ended")
    await frontend.drained()
    assert helper.names() == ["follow", "publish", "follow", "follow", "fail_in_flight", "follow", "drained"]
    assert process.heard[-4:] == helper.heard[-4:]
    assert [each.suspended for (each,) in helper.of("follow")] == ["", "", "the device is away", "it has ended"]
    used, later = (ModelReport("m", version, ModelStatistics(last=at), 0) for version, at in (("1", 5), ("2", 7)))
    process.answers["report"] = Report([used], [PROBLEM], LaneStatistics(1, 2, 3, 4), SlotStatistics(1, 2, 3))
    helper.answers["report"] = Report([later], [], LaneStatistics(0, 9, 0, 5, 6), SlotStatistics(1, 1, 1))
    found = await frontend.report()
    assert frontend.last_uses_known() == {"m": 7}
    assert (found.index, found.lane, found.slots) == ([PROBLEM], LaneStatistics(1, 2, 3, 9, 6), SlotStatistics(2, 3, 4))
    frontend.remove_helper(2)
    assert (await frontend.report()).lane == LaneStatistics(1, 2, 3, 9, 6), "a counter never falls"


async def test_cancel_reaches_the_device(frontend: RemoteFrontend, process: Process) -> None:
    device = Device()
    frontend.open(device)
    await process.meet(frontend)
    proxy(FromLead, process.channel).cancel(3, 14)
    while not device.asked:
        await asyncio.sleep(0)
    assert device.asked == [("acme", 3, 14)]


async def test_renew_keeps_the_old_link_open(frontend: RemoteFrontend) -> None:
    before = frontend.descriptors
    free = frontend.renew()
    assert set(frontend.descriptors[:4]).isdisjoint(before[:4])
    assert os.fstat(before.memory).st_size > 0
    free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(before.memory)


async def test_a_new_link_leads_to_the_same_memory(frontend: RemoteFrontend) -> None:
    links.attach(frontend.descriptors).arena.memory.view[:4] = b"mine"
    frontend.renew()()
    assert bytes(links.attach(frontend.descriptors).arena.memory.view[:4]) == b"mine"


async def test_relink_gives_the_process_a_new_link_to_the_same_memory(frontend: RemoteFrontend, process: Process) -> None:
    await process.meet(frontend)
    before = frontend.descriptors
    links.attach(before).arena.memory.view[:4] = b"mine"
    process.answers["relink"] = True
    free = await frontend.relink(5)
    ((link, limit),) = process.of("relink")
    assert (link.slots, link.nbytes, limit) == (before.slots, before.nbytes, 5)
    assert frontend.descriptors != before
    (received,) = process.links
    there = links.attach(received)
    assert bytes(there.arena.memory.view[:4]) == b"mine"
    device_side = links.attach(frontend.descriptors)
    device_side.tickets.open()
    there.tickets.write(ticket := Ticket(0, 1, "m", (), 1.0, 0))
    there.tickets.put([ticket])
    assert device_side.tickets.poll() == ticket
    assert os.fstat(before.arena), "the old link is open until its device side has left it"
    free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(before.arena)


@pytest.mark.parametrize(("answer", "error"), [(False, Conflict), (OSError("no memory"), Failed)])
async def test_the_old_link_stays_when_the_process_cannot_change_it(
    frontend: RemoteFrontend, answer: object, error: type[Exception]
) -> None:
    process = Process()
    channel = await process.meet(frontend)
    before, opened = frontend.descriptors, len(os.listdir("/proc/self/fd"))
    process.answers["relink"] = answer
    with pytest.raises(error) as raised:
        await asyncio.wait_for(frontend.relink(5), 30)
    if error is Conflict:
        assert str(raised.value).startswith("tenant acme: an inference has been running for 5 s; its link was not replaced")
    assert frontend.descriptors == before
    channel.close()
    process.close()
    assert len(os.listdir("/proc/self/fd")) <= opened, "the new link is closed at both ends"


@pytest.mark.parametrize("gone", ["before it is asked", "before it answers"])
async def test_a_process_that_ends_while_its_link_changes_leaves_a_new_link_for_its_replacement(
    frontend: RemoteFrontend, process: Process, gone: str
) -> None:
    await process.meet(frontend)
    before = frontend.descriptors
    process.answers["relink"] = never = asyncio.Event().wait()
    if gone == "before it is asked":
        process.close()
    relinked = asyncio.ensure_future(frontend.relink())
    while gone != "before it is asked" and not process.links:
        await asyncio.sleep(0)
    process.close()
    free = await relinked
    after = frontend.descriptors
    assert after != before
    free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(before.arena)
    frontend.renew()()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(after.arena)
    never.close()


async def test_relink_waits_for_a_process_that_is_being_started(frontend: RemoteFrontend, process: Process) -> None:
    relinked = asyncio.ensure_future(frontend.relink())
    process.answers["relink"] = True
    await asyncio.sleep(0)
    before = frontend.descriptors
    await process.meet(frontend)
    (await relinked)()
    assert frontend.descriptors != before
    assert len(process.links) == 1


async def test_relink_does_not_wait_for_ever_for_a_process(frontend: RemoteFrontend) -> None:
    before, opened = frontend.descriptors, len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        Conflict, match=r"^tenant acme: its HTTP process has been starting for more than 0\.01 s; its link was not"
    ):
        await asyncio.wait_for(frontend.relink(0.01), PATIENCE)
    assert (frontend.descriptors, len(os.listdir("/proc/self/fd"))) == (before, opened)


async def test_relink_goes_on_when_its_caller_is_cancelled(frontend: RemoteFrontend, process: Process) -> None:
    """Otherwise the process could use the new link, and the device side the old one."""
    await process.meet(frontend)
    answered = asyncio.Event()

    async def answer() -> bool:
        return await answered.wait()

    process.answers["relink"] = answer()
    before = frontend.descriptors
    relinked = asyncio.ensure_future(frontend.relink())
    while not process.links:
        await asyncio.sleep(0)
    relinked.cancel()
    await asyncio.wait([relinked])
    answered.set()
    while frontend.descriptors == before:
        await asyncio.sleep(0)
    before.close()


async def test_fail_in_flight_is_sent_and_a_replacement_refuses_too(frontend: RemoteFrontend, process: Process) -> None:
    await process.meet(frontend)
    process.heard.clear()
    frontend.fail_in_flight("gone", queued=False)
    frontend.fail_in_flight("gone")
    await frontend.drained()
    assert process.heard == [
        ("fail_in_flight", "gone", False),
        ("fail_in_flight", "gone", True),
        ("follow", Wanted(suspended="gone")),
        ("drained",),
    ]
    process.close_both_ends()
    frontend.renew()()
    replacement = Process()
    await replacement.meet(frontend)
    assert replacement.of("follow") == [(Wanted(suspended="gone"),)] * 2
    replacement.close_both_ends()


async def test_the_partitions_cores_override_assigned_cores(frontend: RemoteFrontend, process: Process) -> None:
    await process.meet(frontend)
    for told in (frozenset({2}), frozenset({3})):
        frontend.assign_cores(told)
    frontend.set_cores(None)
    frontend.set_cores(frozenset({5}))
    frontend.assign_cores(frozenset({4}))
    await frontend.drained()
    assert [each.cores for (each,) in process.of("follow")][2:] == [{2}, {3}, {3}, {5}, {5}]


async def test_configured_front_cores_override_those_of_the_partition() -> None:
    frontend = open_remote(TenantConfig(name="acme", granules=1, models=("*",), front_cores=(0,)))
    process = Process()
    frontend.set_cores(frozenset({5}))
    await process.meet(frontend)
    assert process.of("follow")[0] == (Wanted(cores=frozenset({0})),)
    process.close_both_ends()
    frontend.close()


async def test_cancelling_a_slot_that_the_link_does_not_have_closes_the_channel(
    frontend: RemoteFrontend, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    frontend.open(device)
    channel = await process.meet(frontend)
    proxy(FromLead, process.channel).cancel(frontend.descriptors.slots, 1)
    await asyncio.wait_for(channel.closed.wait(), 10)
    assert device.asked == []
    assert f"slot {frontend.descriptors.slots} of {frontend.descriptors.slots}" in caplog.text


async def test_only_the_lead_may_cancel_tickets(frontend: RemoteFrontend, process: Process, helper: Process) -> None:
    device = Device()
    frontend.open(device)
    channel, to_helper = await process.meet(frontend), await helper.join(frontend, 2)
    proxy(FromLead, helper.channel).cancel(0, 1)
    await asyncio.wait_for(to_helper.closed.wait(), 10)
    assert (device.asked, to_helper.distrusted, channel.closed.is_set()) == ([], True, False)


def shown(process: Process) -> dict[str, str]:
    """What the process was sent last of each model that was paged out or in."""
    return {arguments[0]: name for name, *arguments in process.heard if name in ("page_out", "page_in")}


async def test_a_model_that_comes_back_while_a_publication_shows_it_paged_out_is_not_shown_so(
    frontend: RemoteFrontend, process: Process
) -> None:
    """Its tenant came from another device, which had paged out both. A process begins a call after what follows the call."""
    await process.meet(frontend)
    process.answers["page_out"], process.gates["page_out"] = True, asyncio.Event()
    served = [ModelVersion("m", version, f"m/{version}#1", SIGNATURE, "onnxruntime_onnx", {}) for version in "12"]
    frontend.change_device([each.key for each in served], "")
    publishing = asyncio.ensure_future(frontend.publish("m", served, []))
    await process.hears("page_out")
    for each in served:
        frontend.page_in(each.key)
        await process.hears("page_in", each.key)
    process.heard.clear()
    process.gates["page_out"].set()
    await publishing
    await frontend.drained()
    assert set(shown(process).values()) == {"page_in"}, "the call is answered last"
    process.close_both_ends()
    another = Process()
    await another.meet(frontend)
    assert shown(another) == {}
    another.close_both_ends()


async def test_a_process_that_comes_while_a_model_is_paged_out_shows_it_so(
    frontend: RemoteFrontend, process: Process, helper: Process
) -> None:
    await process.meet(frontend)
    process.answers["page_out"], process.gates["page_out"] = True, asyncio.Event()
    paging = asyncio.ensure_future(frontend.page_out("m/1#1"))
    await process.hears("page_out")
    await helper.join(frontend, 2)
    process.gates["page_out"].set()
    assert await paging
    assert shown(helper) == {"m/1#1": "page_out"}


async def test_a_process_that_comes_while_a_model_comes_back_does_not_show_it_as_paged_out(
    frontend: RemoteFrontend, process: Process, helper: Process
) -> None:
    """It begins a call after the notifications that follow the call."""
    await process.meet(frontend)
    process.answers["page_out"] = helper.answers["page_out"] = True
    helper.gates["page_out"] = asyncio.Event()
    assert await frontend.page_out("m/1#1")
    joining = asyncio.ensure_future(helper.join(frontend, 2))
    await helper.hears("page_out")
    frontend.page_in("m/1#1")
    await helper.hears("page_in")
    helper.heard.clear()
    helper.gates["page_out"].set()
    await joining
    await frontend.drained()
    assert shown(helper) == {"m/1#1": "page_in"}, "the call is answered last"


async def test_a_model_with_requests_is_shown_as_paged_out_by_no_helper(
    frontend: RemoteFrontend, process: Process, helper: Process
) -> None:
    await process.meet(frontend)
    await helper.join(frontend, 2)
    process.answers["page_out"], helper.answers["page_out"] = False, True
    assert not await frontend.page_out("m/1#1")
    await frontend.drained()
    assert shown(helper) == {"m/1#1": "page_in"}
