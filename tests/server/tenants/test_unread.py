"""How long, and how much, a tenant's clients may leave unread."""

import asyncio

import pytest

from server.tenants import unread
from server.tenants.unread import MIN_RATE, UnreadAnswers


class Reader:
    """A connection with so many bytes unread."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.aborted = False
        self.gone = asyncio.Event()

    def unread(self) -> int:
        return self.nbytes

    def abort(self) -> None:
        self.aborted = True
        self.gone.set()


class Bench:
    def __init__(self, limit: int = 1 << 30) -> None:
        self.now = 100.0
        self.closed = 0
        self.answers = UnreadAnswers(limit, "acme", self._count, lambda: self.now)
        self.answers.seconds = 10.0

    def _count(self) -> None:
        self.closed += 1

    def add(self, nbytes: int) -> Reader:
        reader = Reader(nbytes)
        self.answers.add(reader)
        return reader

    def check(self, now: float) -> None:
        self.now = now
        self.answers.check()


async def test_a_client_that_reads_nothing_is_closed_when_its_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    reader = bench.add(1000)
    bench.check(110.0)
    assert not reader.aborted
    bench.check(110.5)
    assert reader.aborted
    assert bench.closed == 1
    assert "does not read its answer: 1000 of 1000 bytes unread after 10 s (server.write_timeout)" in caplog.text
    bench.check(200.0)
    assert bench.closed == 1


async def test_what_a_client_reads_gives_it_more_time() -> None:
    bench = Bench()
    reader = bench.add(10 * MIN_RATE)
    reader.nbytes = 7 * MIN_RATE
    bench.check(112.9)
    assert not reader.aborted
    bench.check(113.1)
    assert reader.aborted


async def test_a_client_that_has_read_is_forgotten_and_without_a_limit_none_is_closed() -> None:
    bench = Bench()
    reader, patient = bench.add(1000), bench.add(1000)
    bench.answers.discard(reader)
    bench.answers.seconds = 0.0
    bench.check(1e6)
    assert not reader.aborted
    assert not patient.aborted


async def test_the_oldest_are_closed_when_there_is_too_much_unread(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(limit=100)
    oldest, second, third = bench.add(40), bench.add(30), bench.add(30)
    assert not oldest.aborted
    large = bench.add(200)
    assert [oldest.aborted, second.aborted, third.aborted, large.aborted] == [True, True, True, False], "one may have more"
    assert bench.closed == 3
    assert "40 bytes unread, and 300 of all connections; together they may have 100 (tenants.acme.memory)" in caplog.text


async def test_it_checks_by_itself_as_long_as_there_is_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "CHECK_INTERVAL", 0.001)
    bench = Bench()
    reader = bench.add(1000)
    bench.now = 200.0
    await reader.gone.wait()
    assert repr(bench.answers) == "<UnreadAnswers of 0 connections>"
