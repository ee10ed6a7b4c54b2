"""Both ends of a channel in one event loop, and what a broken or hostile other end does to it."""

import asyncio
import logging
import pickle
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import uvloop

from server.errors import Failed, Unavailable
from server.processes.channels.rpc import MAX_MESSAGE, Channel, Malformed, Message


class Note(Message):
    value: int


class Echo(Message):
    data: bytes


class Wait(Message):
    name: str = ""


class Ok(Message):
    pass


class Fail(Message):
    pass


class Bounded(Message):
    value: Annotated[int, msgspec.Meta(ge=0)]


@asynccontextmanager
async def channels(handlers: dict[type[Message], Callable[..., Any]]) -> AsyncIterator[tuple[Channel, Channel]]:
    """One that calls, and one with these handlers."""
    ends = socket.socketpair()
    found = Channel("two", {}), Channel("one", handlers)
    for channel, end in zip(found, ends, strict=True):
        await channel.open(end)
    yield found
    for channel in found:
        channel.close()


@asynccontextmanager
async def alone(handlers: dict[type[Message], Callable[..., Any]]) -> AsyncIterator[tuple[Channel, socket.socket]]:
    """One with these handlers, and the bare socket at the other end."""
    ours, theirs = socket.socketpair()
    channel = Channel("the HTTP process of acme", handlers)
    await channel.open(ours)
    with theirs:
        yield channel, theirs
    channel.close()


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def packed(*fields: Any) -> bytes:
    return framed(msgspec.msgpack.encode(fields))


async def test_calls_are_answered_while_another_one_waits() -> None:
    gate = asyncio.Event()

    async def slow(_: Wait) -> int:
        await gate.wait()
        return 1

    async with channels({Wait: slow, Note: lambda note: 2 * note.value}) as (one, other):
        first = one.call(Wait(), int)
        assert await one.call(Note(21), int) == 42
        assert repr(one) == "<Channel to two, 1 calls, 0 to answer>"
        assert repr(other) == "<Channel to one, 0 calls, 1 to answer>"
        gate.set()
        assert await first == 1


async def test_messages_are_handled_in_order() -> None:
    values: list[int] = []
    async with channels({Note: lambda note: values.append(note.value), Ok: lambda _: list(values)}) as (one, _):
        for value in range(1000):
            one.notify(Note(value))
        assert await one.call(Ok(), list[int]) == list(range(1000))


async def test_cancelling_a_call_cancels_its_handler_and_no_other() -> None:
    ended: list[str] = []
    begun, gate = asyncio.Event(), asyncio.Event()

    async def wait(message: Wait) -> str:
        try:
            begun.set()
            await gate.wait()
        except asyncio.CancelledError:
            ended.append(message.name)
            raise
        return message.name

    async def until_begun(_: Echo) -> None:
        await begun.wait()

    async with channels({Wait: wait, Echo: until_begun, Ok: lambda _: list(ended)}) as (one, other):
        first, second = one.call(Wait("first"), str), one.call(Wait("second"), str)
        await one.call(Echo(b""))
        first.cancel()
        assert await one.call(Ok(), list[str]) in ([], ["first"])
        while not ended:
            await asyncio.sleep(0)
        assert repr(other) == "<Channel to one, 0 calls, 1 to answer>"
        gate.set()
        assert await second == "second"
        assert ended == ["first"]


async def test_cancelling_a_call_after_its_answer_was_sent() -> None:
    async with channels({Ok: lambda _: 1}) as (one, _):
        call = one.call(Ok(), int)
        assert await one.call(Ok(), int) == 1  # So the first is answered by now.
        call.cancel()
        assert await one.call(Ok(), int) == 1


async def test_an_answer_to_a_cancelled_call_is_ignored() -> None:
    gate = asyncio.Event()

    async def wait(_: Wait) -> None:
        await gate.wait()

    async with channels({Wait: wait, Ok: lambda _: 1}) as (one, _):
        one.call(Wait()).cancel()
        gate.set()
        assert await one.call(Ok(), int) == 1


async def test_long_messages() -> None:
    async with channels({Echo: lambda echo: echo.data}) as (one, _):
        data = bytes(10_000_000)
        assert await one.call(Echo(data), bytes) == data


async def test_a_message_over_the_limit_fails_where_it_is_made_and_the_channel_stays_open() -> None:
    data = bytes(MAX_MESSAGE)
    async with channels({Ok: lambda _: data, Note: lambda note: note.value}) as (one, _):
        with pytest.raises(Failed, match=rf"^a message of \d+ bytes; at most {MAX_MESSAGE}$"):
            await one.call(Echo(data))
        with pytest.raises(Failed, match=r"ValueError: a message of \d+ bytes"):
            await one.call(Ok(), bytes)
        assert await one.call(Note(1), int) == 1


async def test_a_handler_that_raises_fails_the_call() -> None:
    async with channels({Fail: lambda _: 1 / 0, Ok: lambda _: lambda: None}) as (one, _):
        with pytest.raises(Failed, match="ZeroDivisionError: division by zero"):
            await one.call(Fail())
        with pytest.raises(Failed, match="function"):
            await one.call(Ok())


async def test_a_notification_whose_handler_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with channels({Fail: lambda _: 1 / 0, Ok: lambda _: 1}) as (one, _):
        one.notify(Fail())
        assert await one.call(Ok(), int) == 1
    assert "division by zero" in caplog.text


async def test_calls_fail_when_the_other_process_ends() -> None:
    async with alone({}) as (channel, theirs):
        call, given_up = channel.call(Ok(), int), channel.call(Ok(), int)
        given_up.cancel()
        theirs.sendall(packed("result", 1, 1)[:-1])  # It dies in the middle of its answer.
        theirs.close()
        with pytest.raises(Unavailable, match="the other process is gone"):
            await call
        await channel.closed.wait()
        with pytest.raises(Unavailable):
            await channel.call(Ok())
        channel.notify(Ok())
        assert "closed" in repr(channel)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_channel_that_is_finished_handles_what_was_sent_though_the_other_end_stays_open(run: Callable[..., None]) -> None:
    async def finish() -> None:
        found: list[int] = []
        ours, theirs = socket.socketpair()
        kept = theirs.dup()
        channel, other = Channel("two", {Note: lambda note: found.append(note.value)}), Channel("one", {})
        await other.open(theirs)
        await channel.open(ours)
        for value in range(3):
            other.notify(Note(value))
        channel.finish()
        await asyncio.wait_for(channel.closed.wait(), 10)
        assert found == [0, 1, 2]
        channel.finish()
        kept.close()
        other.close()

    run(finish())


async def test_a_call_before_the_channel_is_open_fails() -> None:
    channel = Channel("two", {})
    with pytest.raises(Unavailable):
        await channel.call(Ok())
    channel.close()
    assert channel.closed.is_set()


class Trap:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


MALFORMED = {
    "junk": framed(b"junk"),
    "nothing": framed(b""),
    "bytes after a message": framed(msgspec.msgpack.encode(["notify", ["Ok"]]) + b"\xc0"),
    "no frame": packed("shout", 1),
    "a frame without its fields": packed("call"),
    "a number that is none": packed("call", "1", ["Ok"]),
    "a message of no known type": packed("notify", ["Unknown"]),
    "a message that only the other side may send": packed("notify", ["Echo", b""]),
    "a field of another type": packed("notify", ["Bounded", "1"]),
    "a field that is missing": packed("notify", ["Bounded"]),
    "a field out of range": packed("call", 1, ["Bounded", -1]),
    "an object in place of a message": packed("notify", {"Ok": 1}),
    "nested without end": framed(b"\x91" * 100_000),
    "too long": (MAX_MESSAGE + 1).to_bytes(4, "little"),
    "a handler finds it malformed": packed("notify", ["Fail"]),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_message_closes_the_channel(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def malformed(_: Fail) -> None:
        raise Malformed("slot 7 of 4")

    handled: list[Any] = []
    async with alone({Ok: handled.append, Bounded: handled.append, Fail: malformed}) as (channel, theirs):
        theirs.sendall(data)
        await asyncio.wait_for(channel.closed.wait(), 10)
        theirs.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b""
    (record,) = caplog.records
    assert (record.levelno, handled) == (logging.ERROR, [])
    assert record.getMessage().startswith("malformed message from the HTTP process of acme; closing its channel: ")


@pytest.mark.parametrize("result", [["result", 1, "no number"], ["result", 1, {}], ["result", 1]])
async def test_a_malformed_result_closes_the_channel(result: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    async with alone({}) as (channel, theirs):
        call = channel.call(Ok(), int)
        theirs.sendall(packed(*result))
        with pytest.raises(Unavailable):
            await call
        assert channel.closed.is_set()
    assert "malformed message" in caplog.text


@pytest.mark.parametrize("as_field", [False, True], ids=["a pickle", "a pickle as a field"])
async def test_a_pickle_is_refused_and_never_loaded(tmp_path: Path, as_field: bool, caplog: pytest.LogCaptureFixture) -> None:
    trap = pickle.dumps((0, "cancel", (Trap(tmp_path / "loaded"),)))
    async with alone({Ok: lambda _: None, Bounded: lambda _: None}) as (channel, theirs):
        theirs.sendall(packed("notify", ["Bounded", trap]) if as_field else framed(trap))
        await asyncio.wait_for(channel.closed.wait(), 10)
    assert "malformed message" in caplog.text
    assert not (tmp_path / "loaded").exists()
    pickle.loads(trap)
    assert (tmp_path / "loaded").exists(), "the trap works"


def test_nothing_raises_while_the_other_process_ends() -> None:
    """uvloop, which the server runs on, raises for writes between the end of a connection and the callback about it."""

    async def send() -> None:
        ours, theirs = socket.socketpair()
        channel = Channel("two", {})
        await channel.open(ours)
        theirs.close()
        while not channel.closed.is_set():
            channel.notify(Ok())
            await asyncio.sleep(0)

    uvloop.run(asyncio.wait_for(send(), 10))
