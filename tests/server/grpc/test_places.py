"""Places are handed out in turn to connections, however many calls each has."""

import asyncio

from server.grpc.tenant_port import Places


class Call:
    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer


async def asked(places: Places, peer: str, found: list[str]) -> "asyncio.Task[None]":
    async def take() -> None:
        await places.take(Call(peer))
        found.append(peer)

    task = asyncio.create_task(take())
    await asyncio.sleep(0)
    return task


async def test_a_connection_with_many_calls_waits_behind_itself() -> None:
    places, found = Places(1), list[str]()
    tasks = [await asked(places, peer, found) for peer in ("a", "a", "a", "b", "a", "c")]
    assert found == ["a"]
    for _ in range(5):
        assert (places.full, places.wanted) == (True, True)
        places.give()
        await asyncio.sleep(0)
    assert found == ["a", "a", "b", "c", "a", "a"]
    assert not places.wanted
    places.give()
    assert not places.full
    await asyncio.gather(*tasks)


async def test_a_call_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    places, found = Places(1), list[str]()
    for has_come in (False, True):
        await places.take(Call("a"))
        waits = await asked(places, "b", found)
        if has_come:
            places.give()  # To the call that is cancelled before it runs.
        waits.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if not has_come:
            places.give()
        assert not places.full
    assert found == []
