"""One request through an application, without a server."""

import asyncio
from typing import Any

import pytest

from server.errors import Failed
from server.http.asgi import MAX_BODY_BYTES, below_root, respond
from server.http.exchange import Call, Reply

Start = {"type": "http.response.start", "status": 201, "headers": [(b"a", b"b"), (b"content-length", b"4")]}


def call(content: bytes = b"") -> Call:
    async def body(limit: int, grow: object = None) -> bytes:
        assert limit == MAX_BODY_BYTES
        return content

    return Call("PUT", b"/a%20b", b"c=d", {b"e": b"f"}, body, None, ("127.0.0.1", 1))


async def test_application_receives_the_request_and_its_answer_is_collected() -> None:
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([scope, await receive()])
        await send(Start)
        await send({"type": "http.response.body", "body": b"an", "more_body": True})
        await send({"type": "http.response.body", "body": b"sw"})

    assert await respond(application, call(b"body")) == Reply(201, [(b"a", b"b")], b"answ")
    scope, message = seen
    assert (scope["method"], scope["path"], scope["raw_path"], scope["query_string"]) == ("PUT", "/a b", b"/a%20b", b"c=d")
    assert (scope["headers"], scope["client"]) == ([(b"e", b"f")], ("127.0.0.1", 1))
    assert message == {"type": "http.request", "body": b"body", "more_body": False}


async def test_answer_does_not_wait_for_background_work() -> None:
    gate, ended = asyncio.Event(), asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send(Start)
        await send({"type": "http.response.body"})
        await gate.wait()
        ended.set()
        raise ValueError("after the answer")

    assert (await respond(application, call())).status == 201
    assert not ended.is_set()
    gate.set()
    await ended.wait()


async def test_exception_before_the_answer_is_raised() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("broken")

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        await send(Start)

    with pytest.raises(ValueError, match="broken"):
        await respond(broken, call())
    with pytest.raises(Failed, match="gave no answer"):
        await respond(silent, call())


async def test_cancellation_cancels_the_application() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        begun.set()
        try:
            await receive()  # Nothing comes after the body.
        finally:
            ended.set()

    task = asyncio.ensure_future(respond(application, call()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ended.wait()


@pytest.mark.parametrize(
    ("root", "path", "below"),
    [
        ("/api", "/api/v2/x y", "/v2/x y"),
        ("/an api", "/an api/v2", "/v2"),
        ("/api", "/apix", "/apix"),
        ("/api", "/api", "/api"),
        ("/api", "/v2", "/v2"),
        ("/api", "/api/api", "/api"),
        ("", "/v2", "/v2"),
    ],
)
def test_a_path_is_what_follows_the_root_path(root: str, path: str, below: str) -> None:
    scope = below_root({"root_path": root, "path": path, "raw_path": path.replace(" ", "%20").encode()})
    assert (scope["path"], scope["raw_path"]) == (below, below.replace(" ", "%20").encode())
    assert scope["root_path"] == ("" if path != below else root)


def test_the_life_of_a_server_has_no_path() -> None:
    scope = {"type": "lifespan", "root_path": "/api"}
    assert below_root(scope) == scope
