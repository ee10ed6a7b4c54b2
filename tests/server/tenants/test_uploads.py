"""Bodies on their way: what they count against a tenant, and how long they may take."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from server.errors import QueueFull, RequestError, TooSlow, Unavailable
from server.tenants import uploads as uploads_module
from server.tenants.uploads import GRACE, LEAST, Uploads


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
        upload.complete()
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
        uploads.reserve(1)
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_what_is_not_told_counts_as_it_comes_and_what_it_unpacks_to() -> None:
    uploads = Uploads(10, QueueFull)
    with uploads.expect(0) as alone:
        for _ in range(4):
            alone.add_received(3)
        assert repr(uploads) == "<Uploads 1 on their way, 12 of 10 bytes>"
        assert repr(alone) == "<AwaitedBody 12 of 0 bytes>"
    with uploads.expect(2) as told, uploads.expect(3):
        told.add_received(1)
        told.add_received(1)
        told.reserve_more(5)
        with pytest.raises(QueueFull, match="a body of 8 bytes while 3 bytes of others"):
            told.reserve_more(1)
    assert repr(uploads) == "<Uploads 0 on their way, 0 of 10 bytes>"


async def test_a_body_that_comes_too_slowly_is_refused_and_one_that_comes_as_it_should_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads_module, "LOOK", 0)
    now = 0.0
    uploads = Uploads(100, clock=lambda: now)
    silent, steady, complete = Connection(), Connection(came=LEAST * 10), asyncio.ensure_future(expecting(uploads))
    await asyncio.sleep(0)
    uploads.add(silent, 10)
    uploads.add(steady, 20)
    now = GRACE
    await asyncio.sleep(0.01)
    assert silent.told == []
    now = GRACE + 9
    uploads.add(late := Connection(), 1)
    with pytest.raises(TooSlow, match="0 bytes of the body came in 39 s; expected 16384 a second after the first 30 s"):
        await asyncio.wait_for(complete, 10)
    assert isinstance(silent.told[0], TooSlow)
    assert steady.told == late.told == []
    for each in (silent, steady, late):
        uploads.discard(each)
