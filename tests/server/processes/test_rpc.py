"""Both ends of a channel in one event loop, and what a broken other end does to it."""

import asyncio
import logging
import pickle
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from server.errors import Failed, Unavailable
from server.processes.rpc import Channel


@asynccontextmanager
async def channels(**handlers: Callable[..., Any]) -> AsyncIterator[tuple[Channel, Channel]]:
    """One that asks, and one with these handlers."""
    ends = socket.socketpair()
    found = Channel({}), Channel(handlers)
    for channel, end in zip(found, ends, strict=True):
        await channel.open(end)
    yield found
    for channel in found:
        channel.close()


@asynccontextmanager
async def alone(**handlers: Callable[..., Any]) -> AsyncIterator[tuple[Channel, socket.socket]]:
    """One with these handlers, and the bare socket at the other end."""
    ours, theirs = socket.socketpair()
    channel = Channel(handlers)
    await channel.open(ours)
    with theirs:
        yield channel, theirs
    channel.close()


def packed(*message: Any) -> bytes:
    data = pickle.dumps(message)
    return len(data).to_bytes(4, "little") + data


async def test_questions_are_answered_whatever_else_is_asked_meanwhile() -> None:
    gate = asyncio.Event()

    async def slow(value: int) -> int:
        await gate.wait()
        return value

    async with channels(slow=slow, double=lambda value: 2 * value) as (one, other):
        first = one.call("slow", 1)
        assert await one.call("double", 21) == 42
        assert repr(one) == "<Channel 1 asked, 0 to answer>"
        assert repr(other) == "<Channel 0 asked, 1 to answer>"
        gate.set()
        assert await first == 1


async def test_notes_and_questions_are_heard_in_order() -> None:
    heard: list[int] = []
    async with channels(note=heard.append, count=lambda: list(heard)) as (one, _):
        for value in range(1000):
            one.notify("note", value)
        assert await one.call("count") == list(range(1000))


async def test_a_question_that_is_given_up_is_given_up_at_the_other_end_and_no_other() -> None:
    ended: list[str] = []
    begun, gate = asyncio.Event(), asyncio.Event()

    async def wait(name: str) -> str:
        try:
            begun.set()
            await gate.wait()
        except asyncio.CancelledError:
            ended.append(name)
            raise
        return name

    async with channels(wait=wait, begun=begun.wait, ok=lambda: list(ended)) as (one, other):
        first, second = one.call("wait", "first"), one.call("wait", "second")
        await one.call("begun")
        first.cancel()
        assert await one.call("ok") in ([], ["first"])
        while not ended:
            await asyncio.sleep(0)
        assert repr(other) == "<Channel 0 asked, 1 to answer>"
        gate.set()
        assert await second == "second"
        assert ended == ["first"]


async def test_a_question_that_is_given_up_after_its_answer_was_sent_harms_nothing() -> None:
    async with channels(ok=lambda: 1) as (one, _):
        asked = one.call("ok")
        assert await one.call("ok") == 1  # So the first is answered by now.
        asked.cancel()
        assert await one.call("ok") == 1


async def test_long_messages_come_whole() -> None:
    async with channels(echo=lambda data: data) as (one, _):
        data = bytes(10_000_000)
        assert await one.call("echo", data) == data


async def test_a_handler_that_raises_is_an_answer() -> None:
    async with channels(fail=lambda: 1 / 0, odd=lambda: lambda: None) as (one, _):
        with pytest.raises(Failed, match="ZeroDivisionError: division by zero"):
            await one.call("fail")
        with pytest.raises(Failed, match="pickle"):
            await one.call("odd")
        with pytest.raises(Failed, match="KeyError: 'unknown'"):
            await one.call("unknown")


async def test_a_note_that_cannot_be_done_is_logged_and_the_next_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    async with channels(fail=lambda: 1 / 0, ok=lambda: 1) as (one, _):
        one.notify("fail")
        assert await one.call("ok") == 1
    assert "division by zero" in caplog.text


async def test_who_asks_is_told_when_the_other_end_goes_away() -> None:
    async with alone() as (channel, theirs):
        asked, given_up = channel.call("anything"), channel.call("anything")
        given_up.cancel()
        theirs.sendall(packed(1, None, (True, 1))[:-1])  # It dies in the middle.
        theirs.close()
        with pytest.raises(Unavailable, match="the other process is gone"):
            await asked
        await channel.closed.wait()
        with pytest.raises(Unavailable):
            await channel.call("anything")
        channel.notify("nobody hears")
        assert "closed" in repr(channel)


async def test_nobody_can_be_asked_before_the_channel_is_open() -> None:
    channel = Channel({})
    with pytest.raises(Unavailable):
        await channel.call("anything")
    channel.close()
    assert channel.closed.is_set()


@pytest.mark.parametrize("data", [b"\4\0\0\0junk", packed(1), packed(0, "unknown", ())])
async def test_what_makes_no_sense_ends_the_channel(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with alone() as (channel, theirs):
        theirs.sendall(data)
        await channel.closed.wait()
        theirs.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b""
    assert "makes no sense" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR


async def test_an_answer_that_nobody_waits_for_is_forgotten() -> None:
    gate = asyncio.Event()
    async with channels(wait=gate.wait, ok=lambda: 1) as (one, _):
        one.call("wait").cancel()
        gate.set()
        assert await one.call("ok") == 1


def test_what_is_said_while_the_other_end_goes_away_is_heard_by_nobody_and_raises_nothing() -> None:
    """uvloop, which the server runs on, raises for what is written between a broken connection and the word of it."""

    async def say() -> None:
        ours, theirs = socket.socketpair()
        channel = Channel({})
        await channel.open(ours)
        theirs.close()
        while not channel.closed.is_set():
            channel.notify("anything")
            await asyncio.sleep(0)

    uvloop.run(asyncio.wait_for(say(), 10))
