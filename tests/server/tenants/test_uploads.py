"""Uploads: how the bodies of requests count against a tenant's memory, and how long they may take."""

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from server.errors import QueueFull, RequestError, TooSlow, Unavailable
from server.link import occupancy
from server.link.occupancy import Occupancy
from server.tenants import uploads as uploads_module
from server.tenants.uploads import GRACE, MIN_RATE, Uploads


async def never() -> bytes:
    found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    return await found


async def expecting(uploads: Uploads, nbytes: int = 0, body: Callable[[], Awaitable[bytes]] = never) -> bytes:
    with uploads.expect(nbytes):
        return await body()


class Connection:
    """A connection that waits for a body, of which `came` bytes have arrived; `refusals` are the errors it was refused with."""

    def __init__(self, came: int = 0) -> None:
        self.came = came
        self.refusals: list[RequestError] = []

    def received(self) -> int:
        return self.came

    def refuse(self, error: RequestError) -> None:
        self.refusals.append(error)


async def test_bodies_of_several_processes_share_one_limit() -> None:
    page = occupancy.create(1 << 20)
    one, other = (Uploads(10, QueueFull, occupancy=Occupancy(page, number)) for number in (1, 2))
    one.reserve(6)
    with pytest.raises(QueueFull, match="a body of 5 bytes while 6 bytes of others are on their way; together"):
        other.reserve(5)
    other.reserve(4)
    one.release(6)
    other.reserve(6)
    with pytest.raises(QueueFull):
        one.reserve(1)
    os.close(page)


async def test_refuse_raises_the_reason_where_a_body_is_awaited() -> None:
    uploads = Uploads(10)
    waiting = asyncio.ensure_future(expecting(uploads, 7))
    await asyncio.sleep(0)
    assert repr(uploads) == "<Uploads 1 on their way, 7 of 10 bytes>"
    uploads.refuse("the server is draining")
    with pytest.raises(Unavailable, match="the server is draining"):
        await waiting
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


@pytest.mark.parametrize("also", [False, True], ids=["only", "refused too"])
async def test_a_task_that_awaits_a_body_can_be_cancelled(also: bool) -> None:
    uploads = Uploads(10)
    waiting = asyncio.ensure_future(expecting(uploads, 7))
    await asyncio.sleep(0)
    if also:
        uploads.refuse("the server is draining")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_a_complete_body_is_not_refused_and_counts_until_it_was_used() -> None:
    uploads = Uploads(10)
    with uploads.expect(7) as upload:
        upload.complete()
        uploads.refuse("the server is draining")
        await asyncio.sleep(0)
        assert repr(uploads) == "<Uploads 0 on their way, 7 of 10 bytes>"
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_refuse_reaches_only_connections_that_still_wait() -> None:
    uploads, one, other = Uploads(10), Connection(), Connection()
    uploads.add(one, 1)
    uploads.add(other, 2)
    uploads.discard(other)
    uploads.discard(other)
    uploads.refuse("the server is draining")
    assert [str(error) for error in one.refusals] == ["the server is draining"]
    assert other.refusals == []
    uploads.discard(one)
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_bodies_that_do_not_fit_together_are_refused_and_a_single_one_is_not() -> None:
    uploads = Uploads(10, QueueFull)
    with uploads.expect(12), pytest.raises(QueueFull, match=r"1 bytes while 12 bytes of others are on their way; .* have 10"):
        uploads.add(Connection(), 1)
    with uploads.expect(5), uploads.expect(5), pytest.raises(QueueFull):
        uploads.reserve(1)
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_a_body_of_unknown_length_counts_as_it_arrives_and_as_it_is_decompressed() -> None:
    uploads = Uploads(10, QueueFull)
    with uploads.expect(0) as alone:
        for _ in range(4):
            alone.add_received(3)
        assert repr(uploads) == "<Uploads 1 on their way, 12 of 10 bytes>"
        assert repr(alone) == "<AwaitedBody 12 of 0 bytes>"
    with uploads.expect(2) as sized, uploads.expect(3):
        sized.add_received(1)
        sized.add_received(1)
        sized.reserve_more(5)
        with pytest.raises(QueueFull, match="a body of 8 bytes while 3 bytes of others"):
            sized.reserve_more(1)
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_a_body_that_arrives_too_slowly_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads_module, "CHECK_INTERVAL", 0)
    now = 0.0
    uploads = Uploads(100, clock=lambda: now)
    silent, steady, complete = Connection(), Connection(came=MIN_RATE * 10), asyncio.ensure_future(expecting(uploads))
    await asyncio.sleep(0)
    uploads.add(silent, 10)
    uploads.add(steady, 20)
    now = GRACE
    await asyncio.sleep(0.01)
    assert silent.refusals == []
    now = GRACE + 9
    uploads.add(late := Connection(), 1)
    with pytest.raises(TooSlow, match="0 bytes of the body came in 39 s; expected 16384 a second after the first 30 s"):
        await asyncio.wait_for(complete, 10)
    assert isinstance(silent.refusals[0], TooSlow)
    assert steady.refusals == late.refusals == []
    for each in (silent, steady, late):
        uploads.discard(each)
