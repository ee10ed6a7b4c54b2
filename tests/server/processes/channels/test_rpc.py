"""Both ends of a channel in one event loop, and what a broken or hostile other end does to it."""

import asyncio
import logging
import pickle
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any

import msgspec
import pytest
import uvloop

from server.errors import Failed, QueueFull, Unavailable
from server.processes.channels.rpc import MAX_MESSAGE, MOST_BYTES, MOST_CALLS, Channel, Handler, Handlers, Malformed


def answers(run: Callable[..., Any], *types: Any) -> Handler:
    """Answers calls with arguments of these types."""

    async def awaited(*arguments: Any) -> Any:
        found = run(*arguments)
        return await found if asyncio.iscoroutine(found) else found

    return hears(awaited, *types)._replace(awaited=True)


def hears(run: Callable[..., Any], *types: Any) -> Handler:
    """As `answers`, for notifications."""
    return Handler(msgspec.msgpack.Decoder(GenericAlias(tuple, types)), False, run)


COUNT = Annotated[int, msgspec.Meta(ge=0)]


@asynccontextmanager
async def channels(handlers: Handlers) -> AsyncIterator[tuple[Channel, Channel]]:
    """One that calls, and one with these handlers."""
    ends = socket.socketpair()
    found = Channel("two", {}), Channel("one", handlers)
    for channel, end in zip(found, ends, strict=True):
        await channel.open(end)
    yield found
    for channel in found:
        channel.close()


@asynccontextmanager
async def alone(handlers: Handlers) -> AsyncIterator[tuple[Channel, socket.socket]]:
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

    async def slow() -> int:
        await gate.wait()
        return 1

    async with channels({"wait": answers(slow), "double": answers(lambda value: 2 * value, int)}) as (one, other):
        first = one.call("wait", [], int)
        assert await one.call("double", [21], int) == 42
        assert repr(one) == "<Channel to two, 1 calls, 0 to answer>"
        assert repr(other) == "<Channel to one, 0 calls, 1 to answer>"
        gate.set()
        assert await first == 1


async def test_messages_are_handled_in_order() -> None:
    values: list[int] = []
    async with channels({"note": hears(values.append, int), "ok": answers(lambda: list(values))}) as (one, _):
        for value in range(1000):
            one.notify("note", [value])
        assert await one.call("ok", [], list[int]) == list(range(1000))


async def test_cancelling_a_call_cancels_its_handler_and_no_other() -> None:
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

    async def until_begun() -> None:
        await begun.wait()

    async with channels({"wait": answers(wait, str), "begun": answers(until_begun), "ok": answers(lambda: list(ended))}) as (
        one,
        other,
    ):
        first, second = one.call("wait", ["first"], str), one.call("wait", ["second"], str)
        await one.call("begun", [], None)
        first.cancel()
        assert await one.call("ok", [], list[str]) in ([], ["first"])
        while not ended:
            await asyncio.sleep(0)
        assert repr(other) == "<Channel to one, 0 calls, 1 to answer>"
        gate.set()
        assert await second == "second"
        assert ended == ["first"]


async def test_cancelling_a_call_after_its_answer_was_sent() -> None:
    async with channels({"ok": answers(lambda: 1)}) as (one, _):
        call = one.call("ok", [], int)
        assert await one.call("ok", [], int) == 1  # So the first is answered by now.
        call.cancel()
        assert await one.call("ok", [], int) == 1


async def test_an_answer_to_a_cancelled_call_is_ignored() -> None:
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    async with channels({"wait": answers(wait), "ok": answers(lambda: 1)}) as (one, _):
        one.call("wait", [], None).cancel()
        gate.set()
        assert await one.call("ok", [], int) == 1


async def test_long_messages() -> None:
    async with channels({"echo": answers(lambda data: data, bytes)}) as (one, _):
        data = bytes(10_000_000)
        assert await one.call("echo", [data], bytes) == data


def bounded(handlers: Handlers) -> Handlers:
    return {name: each._replace(bounded=True) for name, each in handlers.items()}


async def test_of_bounded_calls_as_many_are_answered_at_once_as_may_be_and_the_others_are_refused() -> None:
    gate, begun = asyncio.Event(), list[int]()

    async def wait(value: int) -> int:
        begun.append(value)
        await gate.wait()
        return value

    free = {"free": answers(lambda: len(begun))}
    async with channels({**bounded({"wait": answers(wait, int)}), **free}) as (one, _):
        calls = [one.call("wait", [value], int) for value in range(MOST_CALLS + 5)]
        refused = await asyncio.gather(*calls[MOST_CALLS:], return_exceptions=True)
        assert {type(each) for each in refused} == {QueueFull}
        assert str(refused[0]).startswith(f"{MOST_CALLS + 1} requests with ")
        assert await one.call("free", [], int) == MOST_CALLS, "what is not bounded is answered"
        calls[0].cancel()
        again = one.call("wait", [-1], int)
        while -1 not in begun:
            if again.done():  # The other one is not cancelled there yet.
                assert isinstance(again.exception(), QueueFull)
                again = one.call("wait", [-1], int)
            await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(*calls[1:MOST_CALLS], again) == [*range(1, MOST_CALLS), -1]
        assert await one.call("wait", [0], int) == 0


async def test_bounded_calls_of_too_many_bytes_are_refused() -> None:
    gate, data = asyncio.Event(), bytes(MAX_MESSAGE // 2)

    async def wait(data: bytes) -> int:
        await gate.wait()
        return len(data)

    async with channels(bounded({"wait": answers(wait, bytes)})) as (one, _):
        calls = [one.call("wait", [data], int) for _ in range(MOST_BYTES // len(data))]
        with pytest.raises(QueueFull, match=rf"with \d+ bytes in all .* at most {MOST_CALLS} with {MOST_BYTES} bytes"):
            await calls[-1]
        gate.set()
        assert await asyncio.gather(*calls[:-1]) == [len(data)] * len(calls[:-1])
        assert await one.call("wait", [data], int) == len(data)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_process_that_calls_for_ever_and_reads_no_answer_is_given_up(run: Callable[..., None]) -> None:
    data, answered = bytes(MAX_MESSAGE // 2), 0

    def answer() -> bytes:
        nonlocal answered
        answered += 1
        return data

    async def flood() -> None:
        async with alone(bounded({"ok": answers(answer)})) as (channel, theirs):
            theirs.setblocking(False)
            number = 0
            while not channel.closed.is_set():
                number += 1
                with suppress(ConnectionError):
                    await asyncio.get_running_loop().sock_sendall(theirs, packed("call", number, "ok", []))
            assert channel.distrusted

    run(flood())
    assert answered <= 2 * MOST_CALLS


async def test_a_message_over_the_limit_fails_where_it_is_made_and_the_channel_stays_open() -> None:
    data = bytes(MAX_MESSAGE)
    async with channels({"ok": answers(lambda: data), "same": answers(lambda value: value, int)}) as (one, _):
        with pytest.raises(Failed, match=rf"^a message of \d+ bytes; at most {MAX_MESSAGE}$"):
            await one.call("echo", [data], None)
        with pytest.raises(Failed, match=r"ValueError: a message of \d+ bytes"):
            await one.call("ok", [], bytes)
        assert await one.call("same", [1], int) == 1


async def test_a_handler_that_raises_fails_the_call() -> None:
    async with channels({"fail": answers(lambda: 1 / 0), "ok": answers(lambda: lambda: None)}) as (one, _):
        with pytest.raises(Failed, match="ZeroDivisionError: division by zero"):
            await one.call("fail", [], None)
        with pytest.raises(Failed, match="function"):
            await one.call("ok", [], None)


async def test_a_notification_whose_handler_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with channels({"fail": hears(lambda: 1 / 0), "ok": answers(lambda: 1)}) as (one, _):
        one.notify("fail", [])
        assert await one.call("ok", [], int) == 1
    assert "division by zero" in caplog.text


async def test_calls_fail_when_the_other_process_ends() -> None:
    async with alone({}) as (channel, theirs):
        call, given_up = channel.call("ok", [], int), channel.call("ok", [], int)
        given_up.cancel()
        theirs.sendall(packed("result", 1, 1)[:-1])  # It dies in the middle of its answer.
        theirs.close()
        with pytest.raises(Unavailable, match="has ended, and did not answer; send it again"):
            await call
        await channel.closed.wait()
        with pytest.raises(Unavailable):
            await channel.call("ok", [], None)
        channel.notify("ok", [])
        assert "closed" in repr(channel)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_channel_that_is_finished_handles_what_was_sent_though_the_other_end_stays_open(run: Callable[..., None]) -> None:
    async def finish() -> None:
        found: list[int] = []
        ours, theirs = socket.socketpair()
        kept = theirs.dup()
        channel, other = Channel("two", {"note": hears(found.append, int)}), Channel("one", {})
        await other.open(theirs)
        await channel.open(ours)
        for value in range(3):
            other.notify("note", [value])
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
        await channel.call("ok", [], None)
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
    "bytes after a message": framed(msgspec.msgpack.encode(["call", None, "ok", []]) + b"\xc0"),
    "no frame": packed("shout", 1),
    "a frame without its fields": packed("call"),
    "a number that is none": packed("call", "1", "ok", []),
    "a method that is not known": packed("call", None, "unknown", []),
    "a method of the other side": packed("call", None, "echo", [b""]),
    "an argument of another type": packed("call", None, "bounded", ["1"]),
    "an argument that is missing": packed("call", None, "bounded", []),
    "an argument out of range": packed("call", None, "bounded", [-1]),
    "a call of a notification": packed("call", 1, "ok", []),
    "a notification of a call": packed("call", None, "answered", []),
    "an object in place of arguments": packed("call", None, "ok", {"a": 1}),
    "nested without end": framed(b"\x91" * 100_000),
    "too long": (MAX_MESSAGE + 1).to_bytes(4, "little"),
    "a number of a call that is not answered yet": packed("call", 1, "waits", []) * 2,
    "a handler finds it malformed": packed("call", None, "fail", []),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_message_closes_the_channel(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def malformed() -> None:
        raise Malformed("slot 7 of 4")

    handled: list[Any] = []
    handlers = {
        "ok": hears(lambda: handled.append("ok")),
        "answered": answers(lambda: handled.append("answered")),
        "waits": answers(asyncio.Event().wait),
        "bounded": hears(handled.append, COUNT),
        "fail": hears(malformed),
    }
    async with alone(handlers) as (channel, theirs):
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
        call = channel.call("ok", [], int)
        theirs.sendall(packed(*result))
        with pytest.raises(Unavailable):
            await call
        assert channel.closed.is_set()
    assert "malformed message" in caplog.text


@pytest.mark.parametrize("as_field", [False, True], ids=["a pickle", "a pickle as a field"])
async def test_a_pickle_is_refused_and_never_loaded(tmp_path: Path, as_field: bool, caplog: pytest.LogCaptureFixture) -> None:
    trap = pickle.dumps((0, "cancel", (Trap(tmp_path / "loaded"),)))
    async with alone({"ok": hears(lambda: None), "bounded": hears(lambda _: None, COUNT)}) as (channel, theirs):
        theirs.sendall(packed("call", None, "bounded", [trap]) if as_field else framed(trap))
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
            channel.notify("ok", [])
            await asyncio.sleep(0)

    uvloop.run(asyncio.wait_for(send(), 10))
