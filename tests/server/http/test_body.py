"""Lingering on a fake transport; tests/end_to_end/test_sockets.py has real sockets."""

import asyncio
from typing import Any

import pytest

from server.errors import Unavailable
from server.http import body
from server.http.body import (
    CLOSE_SECONDS,
    LINGER_BYTES,
    LINGER_IDLE_SECONDS,
    LINGER_SECONDS,
    SHUTDOWN_IDLE_SECONDS,
    Linger,
    close_when_sent,
)
from server.http.connection_limits import Connections
from tests.passing_time import pass_time


class Transport(asyncio.Transport):
    """Records the calls."""

    def __init__(self, unread: int = 0) -> None:
        super().__init__()
        self.unread = unread
        self.done: list[str] = []
        self.protocol: Any = None

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def can_write_eof(self) -> bool:
        return True

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


def lingering(unsent: int = 0) -> tuple[Linger, Transport, Connections]:
    transport, connections = Transport(unsent), Connections(10)
    linger = Linger(transport, connections)
    linger.begin()
    return linger, transport, connections


async def test_linger_half_closes_and_keeps_reading() -> None:
    linger, transport, connections = lingering()
    connections.allow(0, lambda most: Unavailable(str(most)))
    assert (transport.done, transport.protocol, list(connections)) == (BEGUN, linger, [linger])
    assert not connections.surplus, "it is answered no more"
    linger.connection_lost(None)
    assert list(connections) == []


async def test_linger_discards_a_limited_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    linger, _, _ = lingering()
    assert repr(linger) == f"<Linger {LINGER_BYTES} bytes left>"
    monkeypatch.setattr(body, "LINGER_BYTES", 3)
    linger, transport, _ = lingering()
    linger.data_received(b"12")
    assert transport.done == BEGUN
    linger.data_received(b"3")
    assert transport.done == [*BEGUN, "close"]
    await pass_time(LINGER_SECONDS)
    assert transport.done == [*BEGUN, "close"], "it closes by itself"


async def test_linger_ends_with_the_client_unless_answers_are_unsent() -> None:
    assert not lingering()[0].eof_received()
    assert lingering(unsent=1)[0].eof_received()


async def test_linger_waits_for_a_client_that_reads_late() -> None:
    _, transport, _ = lingering(unsent=1)
    for _ in range(2):
        await pass_time(LINGER_IDLE_SECONDS)
    assert transport.done == BEGUN
    transport.unread = 0
    await pass_time(LINGER_IDLE_SECONDS)
    assert transport.done == [*BEGUN, "close"]


async def test_linger_closes_a_silent_connection_only() -> None:
    linger, transport, _ = lingering()
    linger.data_received(b"1")
    await pass_time(LINGER_IDLE_SECONDS)
    assert transport.done == BEGUN
    await pass_time(LINGER_IDLE_SECONDS)
    assert transport.done == [*BEGUN, "close"]


@pytest.mark.parametrize(("stopping", "seconds"), [(False, LINGER_SECONDS), (True, CLOSE_SECONDS)])
async def test_a_client_that_goes_on_sending_is_closed_at_a_time_limit(stopping: bool, seconds: float) -> None:
    await pass_time(0)
    linger, transport, _ = lingering()
    if stopping:
        linger.shutdown()
    passed, step = 0.0, SHUTDOWN_IDLE_SECONDS
    while transport.done == BEGUN and passed < 2 * LINGER_SECONDS:
        linger.data_received(b"1")
        await pass_time(step)
        passed += step
    assert seconds - step / 2 < passed < seconds + LINGER_IDLE_SECONDS + step
    assert transport.done == [*BEGUN, "close"]


async def test_a_client_that_sends_nothing_is_closed_sooner_when_the_server_stops() -> None:
    linger, transport, _ = lingering()
    linger.data_received(b"1")
    linger.shutdown()
    await pass_time(SHUTDOWN_IDLE_SECONDS)
    assert transport.done == [*BEGUN, "close"]


async def test_client_that_does_not_read_the_last_answer_is_aborted() -> None:
    slow, prompt = Transport(unread=1), Transport()
    for transport in (slow, prompt):
        close_when_sent(transport)
        assert transport.done == ["close"]
    await pass_time(CLOSE_SECONDS)
    assert slow.done == ["close", "abort"]
    assert prompt.done == ["close"]
