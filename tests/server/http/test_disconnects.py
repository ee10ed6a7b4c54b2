import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from server.errors import ClientGone
from server.http.disconnects import DisconnectWatcher

Message = MutableMapping[str, Any]

HERE: Message = {"type": "http.request", "body": b""}
GONE: Message = {"type": "http.disconnect"}


class Client:
    """A connection whose messages come when the test says so; counts how often anybody listened."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.listened = asyncio.Event()
        self.listening = asyncio.Event()
        self.left_alone = asyncio.Event()
        self.listens = 0

    async def receive(self) -> Message:
        self.listens += 1
        self.listened.set()
        try:
            message = await self.messages.get()
            self.listening.set()
            return message
        except asyncio.CancelledError:
            self.left_alone.set()
            raise


def waiting() -> "asyncio.Future[str]":
    return asyncio.get_running_loop().create_future()


async def test_a_client_that_goes_away_ends_the_wait_for_its_answer() -> None:
    watcher, client, answer = DisconnectWatcher(patience=0), Client(), waiting()
    watcher.watch(answer, client.receive)
    await client.listened.wait()
    client.messages.put_nowait(GONE)
    with pytest.raises(ClientGone, match=r"^the client closed its connection$"):
        await answer
    watcher.unwatch(answer)


async def test_a_client_that_says_something_else_is_still_there() -> None:
    watcher, client, answer = DisconnectWatcher(patience=0), Client(), waiting()
    watcher.watch(answer, client.receive)
    client.messages.put_nowait(HERE)
    client.messages.put_nowait(HERE)
    client.messages.put_nowait(GONE)
    with pytest.raises(ClientGone):
        await answer
    assert client.listens == 3
    watcher.unwatch(answer)


async def test_nobody_listens_to_a_client_that_is_answered_before_patience_ends() -> None:
    watcher, quick, slow = DisconnectWatcher(patience=0.001), Client(), Client()
    answered, answer = waiting(), waiting()
    watcher.watch(answered, quick.receive)
    watcher.watch(answer, slow.receive)
    watcher.unwatch(answered)
    await slow.listened.wait()
    assert quick.listens == 0
    watcher.unwatch(answer)


async def test_nobody_listens_any_more_once_the_request_is_forgotten() -> None:
    watcher, client, answer = DisconnectWatcher(patience=0), Client(), waiting()
    watcher.watch(answer, client.receive)
    await client.listened.wait()
    watcher.unwatch(answer)
    await client.left_alone.wait()
    assert not answer.done()


async def test_a_client_that_goes_away_after_its_answer_changes_nothing() -> None:
    watcher, client, answer = DisconnectWatcher(patience=0), Client(), waiting()
    watcher.watch(answer, client.receive)
    await client.listened.wait()
    answer.set_result("done")
    client.messages.put_nowait(GONE)
    await client.listening.wait()
    assert await answer == "done"
    watcher.unwatch(answer)


async def test_only_the_client_that_left_is_gone() -> None:
    watcher, clients, answers = DisconnectWatcher(patience=0), [Client() for _ in range(3)], [waiting() for _ in range(3)]
    for client, answer in zip(clients, answers, strict=True):
        watcher.watch(answer, client.receive)
    await clients[1].listened.wait()
    clients[1].messages.put_nowait(GONE)
    with pytest.raises(ClientGone):
        await answers[1]
    assert [answer.done() for answer in answers] == [False, True, False]
    for answer in answers:
        watcher.unwatch(answer)


async def test_each_client_has_one_listener_however_long_it_waits() -> None:
    watcher, early, late = DisconnectWatcher(patience=0), Client(), Client()
    first, second = waiting(), waiting()
    watcher.watch(first, early.receive)
    await early.listened.wait()
    watcher.watch(second, late.receive)  # The next look meets both.
    await late.listened.wait()
    assert early.listens == 1
    watcher.unwatch(first)
    watcher.unwatch(second)


async def test_looking_begins_again_after_everybody_was_answered() -> None:
    watcher = DisconnectWatcher(patience=0)
    for _ in range(3):
        client, answer = Client(), waiting()
        watcher.watch(answer, client.receive)
        await client.listened.wait()
        watcher.unwatch(answer)
        await client.left_alone.wait()


async def test_departures_show_how_many_wait() -> None:
    watcher, answer = DisconnectWatcher(patience=60), waiting()
    watcher.watch(answer, Client().receive)
    assert repr(watcher) == "<DisconnectWatcher 1 waiting>"
    watcher.unwatch(answer)
    assert repr(watcher) == "<DisconnectWatcher 0 waiting>"
