import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from server.errors import ClientGone
from server.http.infer import DisconnectWatcher

Message = MutableMapping[str, Any]

HERE: Message = {"type": "http.request", "body": b""}
GONE: Message = {"type": "http.disconnect"}


class Client:
    """A connection whose messages the test sends; counts the calls of `receive`."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.listened = asyncio.Event()
        self.received = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.listens = 0

    async def receive(self) -> Message:
        self.listens += 1
        self.listened.set()
        try:
            message = await self.messages.get()
            self.received.set()
            return message
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def waiting() -> "asyncio.Future[str]":
    return asyncio.get_running_loop().create_future()


async def test_no_listener_for_a_request_answered_quickly() -> None:
    watcher, quick, slow = DisconnectWatcher(patience=0.001), Client(), Client()
    answered, answer = waiting(), waiting()
    watcher.watch(answered, quick.receive)
    watcher.watch(answer, slow.receive)
    watcher.unwatch(answered)
    await slow.listened.wait()
    assert quick.listens == 0
    watcher.unwatch(answer)


async def test_disconnect_of_one_client_does_not_affect_others() -> None:
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


async def test_each_waiting_request_has_one_listener() -> None:
    watcher, early, late = DisconnectWatcher(patience=0), Client(), Client()
    first, second = waiting(), waiting()
    watcher.watch(first, early.receive)
    await early.listened.wait()
    watcher.watch(second, late.receive)  # The next check sees both.
    await late.listened.wait()
    assert early.listens == 1
    watcher.unwatch(first)
    watcher.unwatch(second)


async def test_watching_resumes_after_all_requests_were_answered() -> None:
    watcher = DisconnectWatcher(patience=0)
    for _ in range(3):
        client, answer = Client(), waiting()
        watcher.watch(answer, client.receive)
        await client.listened.wait()
        watcher.unwatch(answer)
        await client.cancelled.wait()
