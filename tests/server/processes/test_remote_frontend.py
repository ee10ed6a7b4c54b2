"""A tenant's frontend, with the test at the other end of its channel."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.config.schema import TenantConfig
from server.link import ring as links
from server.processes.messages import (
    Announce,
    CancelTicket,
    GetReport,
    Message,
    Publish,
    Refuse,
    ReportFields,
    SetAffinity,
    SetState,
    WaitUntilIdle,
)
from server.processes.remote_frontend import RemoteFrontend, open_remote
from server.processes.rpc import Channel
from server.scheduling.lane import LaneStatistics
from server.scheduling.slot_pool import SlotStatistics
from server.tenants.catalog import IndexEntry
from server.tenants.frontend import Report

PROBLEM = IndexEntry("broken", "1", "UNAVAILABLE", "no such file")


class Process:
    """The other end of a tenant's channel: keeps what it receives, and answers calls with None or what `answers` holds."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.answers: dict[type[Message], Any] = {}
        self.channel = Channel("the device process", dict.fromkeys(MESSAGES, self._receive))

    def _receive(self, message: Message) -> Any:
        self.heard.append(message)
        return self.answers.get(type(message), True if isinstance(message, Publish) else None)

    async def meet(self, frontend: RemoteFrontend) -> Channel:
        """Connect it to a frontend."""
        ours, theirs = socket.socketpair()
        channel = Channel("the HTTP process of acme", frontend.handlers())
        await channel.open(ours)
        await self.channel.open(theirs)
        await frontend.connect(channel)
        await channel.call(WaitUntilIdle())
        return channel


MESSAGES = (Announce, Publish, SetAffinity, SetState, Refuse, GetReport, WaitUntilIdle)


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


async def test_a_new_process_is_sent_what_its_predecessors_were_sent(frontend: RemoteFrontend) -> None:
    frontend.announce("slow")
    await frontend.publish("broken", [], [PROBLEM])
    frontend.set_cores(frozenset({0}))
    frontend.set_state("serving")
    frontend.refuse("draining")
    process = Process()
    channel = await process.meet(frontend)
    assert process.heard[:-1] == [
        SetAffinity(frozenset({0})),
        Announce("slow"),
        Refuse("draining"),
        Publish("broken", [], [PROBLEM]),
        SetState("serving"),
    ]
    process.heard.clear()
    frontend.set_state("draining")
    await frontend.publish("slow", [], [PROBLEM])
    await frontend.drained()
    assert process.heard == [SetState("draining"), Publish("slow", [], [PROBLEM]), WaitUntilIdle()]
    channel.close()
    process.channel.close()


async def test_without_a_process_calls_return_at_once(frontend: RemoteFrontend) -> None:
    assert (await frontend.report()).index == ()
    await frontend.drained()
    process = Process()
    channel = await process.meet(frontend)
    counted = Report([], [PROBLEM], LaneStatistics(1, 2, 3, 4), SlotStatistics(1, 2, 3))
    process.answers[GetReport] = ReportFields.of(counted)
    assert await frontend.report() == counted
    process.channel.close()
    assert isinstance(await frontend.report(), Report)
    channel.close()


async def test_the_last_report_is_returned_when_the_process_does_not_answer(
    frontend: RemoteFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process()
    channel = await process.meet(frontend)
    counted = Report([], [PROBLEM], LaneStatistics(1, 2, 3, 4), SlotStatistics(1, 2, 3))
    process.answers[GetReport] = ReportFields.of(counted)
    assert (await frontend.report()).age == 0
    monkeypatch.setattr("server.processes.remote_frontend.REPORT_TIMEOUT", 0.01)
    process.answers[GetReport] = never = asyncio.sleep(600)
    stale = await frontend.report()
    assert (stale.index, stale.lane, stale.age > 0) == (counted.index, counted.lane, True)
    process.channel.close()
    assert (await frontend.report()).index == counted.index, "nor where it is gone"
    never.close()
    channel.close()


async def test_cancel_reaches_the_device(frontend: RemoteFrontend) -> None:
    device, process = Device(), Process()
    frontend.open(device)
    channel = await process.meet(frontend)
    process.channel.notify(CancelTicket(3, 14))
    while not device.asked:
        await asyncio.sleep(0)
    assert device.asked == [("acme", 3, 14)]
    channel.close()
    process.channel.close()


async def test_renew_keeps_the_old_link_open(frontend: RemoteFrontend) -> None:
    before, link = frontend.descriptors, frontend.link
    left = frontend.renew()
    assert left == before
    assert frontend.link is not link
    assert set(frontend.descriptors[:4]).isdisjoint(left[:4])
    assert os.fstat(left.memory).st_size > 0
    left.close()


async def test_a_new_link_leads_to_the_same_memory(frontend: RemoteFrontend) -> None:
    memory = frontend.link.arena.memory
    memory.view[:4] = b"mine"
    frontend.renew().close()
    assert frontend.link.arena.memory is memory, "the device reaches it where it is"
    assert bytes(links.attach(frontend.descriptors).arena.memory.view[:4]) == b"mine", "and so does another process"


async def test_the_partitions_cores_override_assigned_cores(frontend: RemoteFrontend) -> None:
    process = Process()
    channel = await process.meet(frontend)
    for told in (frozenset({2}), frozenset({3})):
        frontend.assign_cores(told)
    frontend.set_cores(None)
    frontend.set_cores(frozenset({5}))
    frontend.assign_cores(frozenset({4}))
    await frontend.drained()
    assert [heard.cores for heard in process.heard if isinstance(heard, SetAffinity)] == [{2}, {3}, {3}, {5}, {5}]
    channel.close()
    process.channel.close()


async def test_configured_front_cores_override_those_of_the_partition() -> None:
    frontend = open_remote(TenantConfig(name="acme", granules=1, models=("*",), front_cores=(0,)))
    process = Process()
    frontend.set_cores(frozenset({5}))
    channel = await process.meet(frontend)
    assert SetAffinity(frozenset({0})) in process.heard
    assert repr(frontend).startswith("<RemoteFrontend acme, <Channel")
    channel.close()
    process.channel.close()
    frontend.close()


async def test_cancelling_a_slot_that_the_link_does_not_have_closes_the_channel(
    frontend: RemoteFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    device, process = Device(), Process()
    frontend.open(device)
    channel = await process.meet(frontend)
    process.channel.notify(CancelTicket(frontend.descriptors.slots, 1))
    await asyncio.wait_for(channel.closed.wait(), 10)
    assert device.asked == []
    assert f"slot {frontend.descriptors.slots} of {frontend.descriptors.slots}" in caplog.text
    process.channel.close()
