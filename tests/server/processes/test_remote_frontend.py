"""A tenant's desk, with the test at the other end of its channel."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.config.schema import TenantConfig
from server.link import ring as links
from server.processes.remote_frontend import RemoteFrontend, open_remote
from server.processes.rpc import Channel
from server.scheduling.lane import LaneStatistics
from server.scheduling.slot_pool import SlotStatistics
from server.tenants.catalog import Entry
from server.tenants.frontend import Report

PROBLEM = Entry("broken", "1", "UNAVAILABLE", "no such file")


class Process:
    """What a tenant's process hears; it answers every question with None, or with what `answers` says."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.answers: dict[str, Any] = {}
        self.channel = Channel({name: self._hear(name) for name in NAMES})

    def _hear(self, name: str) -> Any:
        def handler(*arguments: Any) -> Any:
            self.heard.append((name, *arguments))
            return self.answers.get(name)

        return handler

    async def meet(self, desk: RemoteFrontend) -> Channel:
        """Connect it to a desk."""
        ours, theirs = socket.socketpair()
        channel = Channel(desk.handlers())
        await channel.open(ours)
        await self.channel.open(theirs)
        await desk.connect(channel)
        await channel.ask("empty")
        return channel


NAMES = ("announce", "publish", "place", "become", "refuse", "report", "empty")


class Device:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        self.asked.append((tenant, slot, serial))


@pytest.fixture
async def desk() -> AsyncIterator[RemoteFrontend]:
    desk = open_remote(TenantConfig(name="acme", granules=1, models=("*",)))
    yield desk
    desk.close()


async def test_a_process_is_told_everything_that_was_said_before_it_came(desk: RemoteFrontend) -> None:
    desk.announce("slow")
    await desk.publish("broken", [], [PROBLEM])
    desk.place(frozenset({0}))
    desk.become("serving")
    desk.refuse("draining")
    process = Process()
    channel = await process.meet(desk)
    assert process.heard[:-1] == [
        ("place", frozenset({0})),
        ("announce", "slow"),
        ("refuse", "draining"),
        ("publish", "broken", [], [PROBLEM]),
        ("become", "serving"),
    ]
    process.heard.clear()
    desk.become("draining")
    await desk.publish("slow", [], [PROBLEM])
    await desk.empty()
    assert process.heard == [("become", "draining"), ("publish", "slow", [], [PROBLEM]), ("empty",)]
    channel.close()
    process.channel.close()


async def test_without_a_process_nothing_is_waited_for(desk: RemoteFrontend) -> None:
    assert (await desk.report()).index == ()
    await desk.empty()
    process = Process()
    channel = await process.meet(desk)
    process.answers["report"] = counted = Report((), (PROBLEM,), LaneStatistics(1, 2, 3, 4), SlotStatistics(1, 2, 3))
    assert await desk.report() == counted
    process.channel.close()
    assert isinstance(await desk.report(), Report)
    channel.close()


async def test_what_a_process_said_last_is_told_where_it_does_not_answer(
    desk: RemoteFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process()
    channel = await process.meet(desk)
    process.answers["report"] = counted = Report((), (PROBLEM,), LaneStatistics(1, 2, 3, 4), SlotStatistics(1, 2, 3))
    assert (await desk.report()).age == 0
    monkeypatch.setattr("server.processes.remote_frontend.PATIENCE", 0.01)
    process.answers["report"] = never = asyncio.sleep(600)
    stale = await desk.report()
    assert (stale.index, stale.lane, stale.age > 0) == (counted.index, counted.lane, True)
    process.channel.close()
    assert (await desk.report()).index == counted.index, "nor where it is gone"
    never.close()
    channel.close()


async def test_what_the_process_asks_reaches_the_device(desk: RemoteFrontend) -> None:
    device, process = Device(), Process()
    desk.open(device)
    channel = await process.meet(desk)
    process.channel.tell("cancel", 3, 14)
    while not device.asked:
        await asyncio.sleep(0)
    assert device.asked == [("acme", 3, 14)]
    channel.close()
    process.channel.close()


async def test_a_new_link_leaves_the_old_one_to_whoever_still_uses_it(desk: RemoteFrontend) -> None:
    before, link = desk.descriptors, desk.link
    left = desk.renew()
    assert left == before
    assert desk.link is not link
    assert set(desk.descriptors[:4]).isdisjoint(left[:4])
    assert os.fstat(left.memory).st_size > 0
    left.close()


async def test_a_new_link_leads_to_the_same_memory(desk: RemoteFrontend) -> None:
    memory = desk.link.arena.memory
    memory.view[:4] = b"mine"
    desk.renew().close()
    assert desk.link.arena.memory is memory, "the device reaches it where it is"
    assert bytes(links.attach(desk.descriptors).arena.memory.view[:4]) == b"mine", "and so does another process"


async def test_cores_that_are_assigned_come_after_those_of_the_partition(desk: RemoteFrontend) -> None:
    process = Process()
    channel = await process.meet(desk)
    for told in (frozenset({2}), frozenset({3})):
        desk.assign(told)
    desk.place(None)
    desk.place(frozenset({5}))
    desk.assign(frozenset({4}))
    await desk.empty()
    assert [heard[1] for heard in process.heard if heard[0] == "place"] == [{2}, {3}, {3}, {5}, {5}]
    channel.close()
    process.channel.close()


async def test_front_cores_that_are_configured_come_before_those_of_the_partition() -> None:
    desk = open_remote(TenantConfig(name="acme", granules=1, models=("*",), front_cores=(0,)))
    process = Process()
    desk.place(frozenset({5}))
    channel = await process.meet(desk)
    assert ("place", frozenset({0})) in process.heard
    assert repr(desk).startswith("<RemoteFrontend acme, <Channel")
    channel.close()
    process.channel.close()
    desk.close()
