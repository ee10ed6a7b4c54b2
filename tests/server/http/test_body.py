"""What is done with bodies that nobody wants, on a transport that the test plays; sockets are in tests/end_to_end."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from server.errors import QueueFull, RequestError, TooSlow, Unavailable
from server.http import body
from server.http.body import GRACE, LEAST, MOST_DROPPED, Linger, Uploads, hang_up


class Transport(asyncio.Transport):
    """Remembers what was done to it."""

    def __init__(self, unread: int = 0) -> None:
        super().__init__()
        self.unread = unread
        self.done: list[str] = []
        self.protocol: Any = None

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def write_eof(self) -> None:
        self.done.append("write_eof")

    def resume_reading(self) -> None:
        self.done.append("resume_reading")

    def close(self) -> None:
        self.done.append("close")

    def abort(self) -> None:
        self.done.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.done

    def get_write_buffer_size(self) -> int:
        return self.unread


BEGUN = ["write_eof", "resume_reading"]


def lingering(nbytes: float = math.inf) -> tuple[Linger, Transport, set[object]]:
    transport, connections = Transport(), set[object]()
    linger = Linger(transport, nbytes, connections)
    linger.begin()
    return linger, transport, connections


async def test_who_lingers_is_told_that_nothing_more_is_said_and_is_heard() -> None:
    linger, transport, connections = lingering()
    assert (transport.done, transport.protocol, connections) == (BEGUN, linger, {linger})
    linger.connection_lost(None)
    assert connections == set()


async def test_a_connection_is_closed_once_its_body_is_whole() -> None:
    linger, transport, _ = lingering(3)
    linger.data_received(b"12")
    assert repr(linger) == "<Linger 1 bytes left>"
    assert transport.done == BEGUN
    linger.data_received(b"3")
    assert transport.done == [*BEGUN, "close"]
    linger._look()
    assert transport.done == [*BEGUN, "close"], "it closes by itself"


async def test_no_more_is_dropped_than_so_much() -> None:
    linger, transport, _ = lingering()
    assert repr(linger) == f"<Linger {MOST_DROPPED} bytes left>"
    assert transport.done == BEGUN


async def test_who_falls_silent_is_hung_up_on_and_who_sends_on_is_not() -> None:
    linger, transport, _ = lingering()
    linger.data_received(b"1")
    linger._look()
    assert transport.done == BEGUN
    linger._look()
    assert transport.done == [*BEGUN, "close"]


async def test_who_sends_on_for_too_long_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "LINGER", 0)
    linger, transport, _ = lingering()
    linger.data_received(b"1")
    linger._look()
    assert transport.done == [*BEGUN, "close"]


async def test_a_server_that_stops_leaves_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "LAST", 0)
    linger, transport, _ = lingering()
    linger.shutdown()
    linger.data_received(b"1")
    linger._look()
    assert transport.done == [*BEGUN, "close"]


async def test_who_does_not_read_the_last_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "LAST", 0)
    slow, prompt = Transport(unread=1), Transport()
    for transport in (slow, prompt):
        hang_up(transport)
        assert transport.done == ["close"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert slow.done == ["close", "abort"]
    assert prompt.done == ["close"]


async def never() -> bytes:
    found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    return await found


async def expecting(uploads: Uploads, nbytes: int = 0, body: Callable[[], Awaitable[bytes]] = never) -> bytes:
    with uploads.expect(nbytes):
        return await body()


class Connection:
    """A connection that waits for a body, of which so much came; `told` is what it was refused with."""

    def __init__(self, came: int = 0) -> None:
        self.came = came
        self.told: list[RequestError] = []

    def received(self) -> int:
        return self.came

    def refuse(self, error: RequestError) -> None:
        self.told.append(error)


async def test_a_body_that_is_waited_for_is_refused_with_the_reason() -> None:
    uploads = Uploads(10)
    waiting = asyncio.ensure_future(expecting(uploads, 7))
    await asyncio.sleep(0)
    assert repr(uploads) == "<Uploads 1 on their way, 7 of 10 bytes>"
    uploads.refuse("the server is draining")
    with pytest.raises(Unavailable, match="the server is draining"):
        await waiting
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


@pytest.mark.parametrize("also", [False, True], ids=["only", "refused too"])
async def test_who_is_cancelled_while_it_waits_is_cancelled(also: bool) -> None:
    uploads = Uploads(10)
    waiting = asyncio.ensure_future(expecting(uploads, 7))
    await asyncio.sleep(0)
    if also:
        uploads.refuse("the server is draining")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_a_body_that_came_is_refused_no_more_and_counts_until_it_was_used() -> None:
    uploads = Uploads(10)
    with uploads.expect(7) as upload:
        upload.whole()
        uploads.refuse("the server is draining")
        await asyncio.sleep(0)
        assert repr(uploads) == "<Uploads 0 on their way, 7 of 10 bytes>"
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_a_connection_is_told_if_it_still_waits() -> None:
    uploads, one, other = Uploads(10), Connection(), Connection()
    uploads.add(one, 1)
    uploads.add(other, 2)
    uploads.discard(other)
    uploads.discard(other)
    uploads.refuse("the server is draining")
    assert [str(error) for error in one.told] == ["the server is draining"]
    assert other.told == []
    uploads.discard(one)
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_bodies_that_do_not_fit_together_are_refused_and_one_alone_is_not() -> None:
    uploads = Uploads(10, QueueFull)
    with uploads.expect(12), pytest.raises(QueueFull, match=r"1 bytes while 12 bytes of others are on their way; .* have 10"):
        uploads.add(Connection(), 1)
    with uploads.expect(5), uploads.expect(5), pytest.raises(QueueFull):
        uploads.take(1)
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_what_is_not_told_counts_as_it_comes_and_what_it_unpacks_to() -> None:
    uploads = Uploads(10, QueueFull)
    with uploads.expect(0) as alone:
        for _ in range(4):
            alone.grow(3)
        assert repr(uploads) == "<Uploads 1 on their way, 12 of 10 bytes>"
        assert repr(alone) == "<Awaited 12 of 0 bytes>"
    with uploads.expect(2) as told, uploads.expect(3):
        told.grow(1)
        told.grow(1)
        told.swell(5)
        with pytest.raises(QueueFull, match="a body of 8 bytes while 3 bytes of others"):
            told.swell(1)
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_a_body_that_comes_too_slowly_is_refused_and_one_that_comes_as_it_should_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "LOOK", 0)
    now = 0.0
    uploads = Uploads(100, clock=lambda: now)
    silent, steady, whole = Connection(), Connection(came=LEAST * 10), asyncio.ensure_future(expecting(uploads))
    await asyncio.sleep(0)
    uploads.add(silent, 10)
    uploads.add(steady, 20)
    now = GRACE
    await asyncio.sleep(0.01)
    assert silent.told == []
    now = GRACE + 9
    uploads.add(late := Connection(), 1)
    with pytest.raises(TooSlow, match="0 bytes of the body came in 39 s; expected 16384 a second after the first 30 s"):
        await asyncio.wait_for(whole, 10)
    assert isinstance(silent.told[0], TooSlow)
    assert steady.told == late.told == []
    for each in (silent, steady, late):
        uploads.discard(each)
