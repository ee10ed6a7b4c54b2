"""Lingering on a fake transport; tests/end_to_end/test_sockets.py has real sockets."""

import asyncio
from typing import Any

import pytest

from server.errors import Unavailable
from server.http import body
from server.http.body import LINGER_BYTES, Linger, close_when_sent
from server.http.connection_limits import Connections


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
    linger._check()
    assert transport.done == [*BEGUN, "close"], "it closes by itself"


async def test_linger_ends_with_the_client_unless_answers_are_unsent() -> None:
    assert not lingering()[0].eof_received()
    assert lingering(unsent=1)[0].eof_received()


async def test_linger_waits_for_a_client_that_reads_late() -> None:
    linger, transport, _ = lingering(unsent=1)
    linger._check()
    linger._check()
    assert transport.done == BEGUN
    transport.unread = 0
    linger._check()
    assert transport.done == [*BEGUN, "close"]


async def test_linger_closes_a_silent_connection_only() -> None:
    linger, transport, _ = lingering()
    linger.data_received(b"1")
    linger._check()
    assert transport.done == BEGUN
    linger._check()
    assert transport.done == [*BEGUN, "close"]


async def test_linger_closes_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "LINGER_SECONDS", 0)
    linger, transport, _ = lingering()
    linger.data_received(b"1")
    linger._check()
    assert transport.done == [*BEGUN, "close"]


async def test_shutdown_shortens_the_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "CLOSE_SECONDS", 0)
    linger, transport, _ = lingering()
    linger.shutdown()
    linger.data_received(b"1")
    linger._check()
    assert transport.done == [*BEGUN, "close"]


async def test_client_that_does_not_read_the_last_answer_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "CLOSE_SECONDS", 0)
    slow, prompt = Transport(unread=1), Transport()
    for transport in (slow, prompt):
        close_when_sent(transport)
        assert transport.done == ["close"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert slow.done == ["close", "abort"]
    assert prompt.done == ["close"]
