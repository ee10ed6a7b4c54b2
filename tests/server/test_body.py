"""What is done with bodies that nobody wants, on a transport that the test plays; sockets are in tests/end_to_end."""

import asyncio
import math
from typing import Any

import pytest

from server import body
from server.body import MOST_DROPPED, Linger, Uploads, hang_up
from server.errors import Unavailable


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


async def test_a_body_that_is_waited_for_is_refused_with_the_reason() -> None:
    uploads = Uploads()
    waiting = asyncio.ensure_future(uploads.wait(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    assert repr(uploads) == "<Uploads 1 waited for by tasks, 0 by connections>"
    uploads.refuse("the server is draining")
    with pytest.raises(Unavailable, match="the server is draining"):
        await waiting
    assert repr(uploads) == "<Uploads 0 waited for by tasks, 0 by connections>"


@pytest.mark.parametrize("also", [False, True], ids=["only", "refused too"])
async def test_who_is_cancelled_while_it_waits_is_cancelled(also: bool) -> None:
    uploads = Uploads()
    waiting = asyncio.ensure_future(uploads.wait(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    if also:
        uploads.refuse("the server is draining")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert repr(uploads) == "<Uploads 0 waited for by tasks, 0 by connections>"


async def test_a_body_that_came_is_refused_no_more() -> None:
    uploads, loop = Uploads(), asyncio.get_running_loop()
    came: asyncio.Future[bytes] = loop.create_future()
    came.set_result(b"1")
    assert await uploads.wait(came) == b"1"
    uploads.refuse("the server is draining")


async def test_a_connection_is_told_once_if_it_still_waits() -> None:
    told: list[str] = []

    class Connection:
        def refuse(self, reason: str) -> None:
            told.append(reason)

    uploads, one, other = Uploads(), Connection(), Connection()
    uploads.add(one)
    uploads.add(other)
    uploads.discard(other)
    uploads.refuse("the server is draining")
    uploads.refuse("again")
    assert told == ["the server is draining"]
