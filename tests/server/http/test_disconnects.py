import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from server.errors import ClientGone
from server.http.disconnects import Departures

Message = MutableMapping[str, Any]

HERE: Message = {"type": "http.request", "body": b""}
GONE: Message = {"type": "http.disconnect"}


class Client:
    """A connection whose messages come when the test says so; counts how often anybody listened."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.listened = asyncio.Event()
        self.heard = asyncio.Event()
        self.left_alone = asyncio.Event()
        self.listens = 0

    async def receive(self) -> Message:
        self.listens += 1
        self.listened.set()
        try:
            message = await self.messages.get()
            self.heard.set()
            return message
        except asyncio.CancelledError:
            self.left_alone.set()
            raise


def waiting() -> "asyncio.Future[str]":
    return asyncio.get_running_loop().create_future()


async def test_a_client_that_goes_away_ends_the_wait_for_its_answer() -> None:
    departures, client, answer = Departures(patience=0), Client(), waiting()
    departures.note(answer, client.receive)
    await client.listened.wait()
    client.messages.put_nowait(GONE)
    with pytest.raises(ClientGone, match=r"^the client closed its connection$"):
        await answer
    departures.forget(answer)


async def test_a_client_that_says_something_else_is_still_there() -> None:
    departures, client, answer = Departures(patience=0), Client(), waiting()
    departures.note(answer, client.receive)
    client.messages.put_nowait(HERE)
    client.messages.put_nowait(HERE)
    client.messages.put_nowait(GONE)
    with pytest.raises(ClientGone):
        await answer
    assert client.listens == 3
    departures.forget(answer)


async def test_nobody_listens_to_a_client_that_is_answered_before_patience_ends() -> None:
    departures, quick, slow = Departures(patience=0.001), Client(), Client()
    answered, answer = waiting(), waiting()
    departures.note(answered, quick.receive)
    departures.note(answer, slow.receive)
    departures.forget(answered)
    await slow.listened.wait()
    assert quick.listens == 0
    departures.forget(answer)


async def test_nobody_listens_any_more_once_the_request_is_forgotten() -> None:
    departures, client, answer = Departures(patience=0), Client(), waiting()
    departures.note(answer, client.receive)
    await client.listened.wait()
    departures.forget(answer)
    await client.left_alone.wait()
    assert not answer.done()


async def test_a_client_that_goes_away_after_its_answer_changes_nothing() -> None:
    departures, client, answer = Departures(patience=0), Client(), waiting()
    departures.note(answer, client.receive)
    await client.listened.wait()
    answer.set_result("done")
    client.messages.put_nowait(GONE)
    await client.heard.wait()
    assert await answer == "done"
    departures.forget(answer)


async def test_only_the_client_that_left_is_gone() -> None:
    departures, clients, answers = Departures(patience=0), [Client() for _ in range(3)], [waiting() for _ in range(3)]
    for client, answer in zip(clients, answers, strict=True):
        departures.note(answer, client.receive)
    await clients[1].listened.wait()
    clients[1].messages.put_nowait(GONE)
    with pytest.raises(ClientGone):
        await answers[1]
    assert [answer.done() for answer in answers] == [False, True, False]
    for answer in answers:
        departures.forget(answer)


async def test_each_client_has_one_listener_however_long_it_waits() -> None:
    departures, early, late = Departures(patience=0), Client(), Client()
    first, second = waiting(), waiting()
    departures.note(first, early.receive)
    await early.listened.wait()
    departures.note(second, late.receive)  # The next look meets both.
    await late.listened.wait()
    assert early.listens == 1
    departures.forget(first)
    departures.forget(second)


async def test_looking_begins_again_after_everybody_was_answered() -> None:
    departures = Departures(patience=0)
    for _ in range(3):
        client, answer = Client(), waiting()
        departures.note(answer, client.receive)
        await client.listened.wait()
        departures.forget(answer)
        await client.left_alone.wait()


async def test_departures_show_how_many_wait() -> None:
    departures, answer = Departures(patience=60), waiting()
    departures.note(answer, Client().receive)
    assert repr(departures) == "<Departures 1 waiting>"
    departures.forget(answer)
    assert repr(departures) == "<Departures 0 waiting>"
