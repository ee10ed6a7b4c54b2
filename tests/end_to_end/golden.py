"""Requests down to their bytes, and what both `python -m server` and `uvicorn server.app:app` answer to them.

A row is a name, the bytes that a client sends, and the answers, in their order. `test_golden.py` sends every row to both.
"""

import json
from typing import NamedTuple

from .wire import SMALL, post

PATH = "/v2/models/identity/infer"
BODY = json.dumps(SMALL).encode()
RIGHT = '"data":[1.0,2.0]'
"""In the answer to `SMALL`."""
NO_HTTP = "the request is not HTTP: Invalid HTTP request received."


class Answer(NamedTuple):
    """A status and, of an error, its whole text; of another answer, something that its body contains."""

    status: int
    text: str = ""


class Row(NamedTuple):
    """What is sent: pieces, of which each has been read when the next is sent. What is answered, and whether that is all.

    `ends` is whether the server closes the connection after the last answer; if not, it answers one more request on it.
    `keys` is whether the server's tenants have keys.
    """

    sent: tuple[bytes, ...]
    answers: tuple[Answer, ...]
    ends: bool = False
    keys: bool = False


OK = Answer(200, RIGHT)
EMPTY = Answer(400, "the request body is empty; expected an object")
INNER = b"GET /admin/partitions HTTP/1.1\r\nHost: y\r\n\r\n"
"""What would be administration, were it a request."""


def infer(*headers: str, body: bytes = BODY) -> bytes:
    """The bytes of an inference."""
    return post(PATH, body, *headers)


def get(path: str, *headers: str) -> bytes:
    """The bytes of a GET."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()


def offer(protocol: str) -> tuple[str, str]:
    """The headers of a client that would rather speak another protocol."""
    return f"Upgrade: {protocol}", "Connection: Upgrade"


def no_json(at: int) -> Answer:
    """What a body is told that is INNER from this byte on."""
    return Answer(
        400, f"the request body is not JSON: unexpected character, expected a JSON value: GET /admin/parti... at byte {at}"
    )


def split(data: bytes, at: bytes = b"\r\n\r\n") -> tuple[bytes, ...]:
    """The head, and the body a moment later."""
    head, end, body = data.partition(at)
    return head + end, body


CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
JAVA = ("Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA", "Upgrade: h2c")

UPGRADE = {
    "Java's client, HTTP/2 offered": Row((infer(*JAVA),), (OK,)),
    "Java's client, the body after the head": Row(split(infer(*JAVA)), (OK,)),
    "an offer and nothing behind it": Row((get("/v2", *JAVA),), (Answer(200, "greenlane"),)),
    "WebSockets offered": Row(split(infer(*offer("websocket"))), (OK,)),
    "anything offered": Row(split(infer(*offer("x"))), (OK,)),
    "an offer that is not for this connection": Row((infer("Upgrade: h2c"),), (OK,)),
    "an offer with a body in chunks": Row(
        split(post(PATH, CHUNKED, *JAVA).replace(b"Content-Length: %d" % len(CHUNKED), b"Transfer-Encoding: chunked")), (OK,)
    ),
    "an offer and 100 expected": Row(split(infer(*JAVA, "Expect: 100-continue")), (Answer(100), OK)),
    "an offer by a client that closes": Row(
        (infer("Connection: close", "Upgrade: h2c", "Connection: upgrade"),), (OK,), ends=True
    ),
    "a request as the body of one that offers": Row(split(infer(*JAVA, body=INNER)), (no_json(0),)),
    "the same in one piece": Row((infer(*JAVA, body=INNER),), (no_json(0),)),
    "the same behind much white space": Row((infer(*JAVA, body=b"\r\n" * 100_000 + INNER),), (no_json(200_000),)),
    "a request behind one that offers": Row((infer(*JAVA) + infer(),), (OK, OK)),
    "two offers and a request between": Row((infer(*JAVA) + infer() + infer(*JAVA),), (OK, OK, OK)),
}
"""A request that offers an upgrade is a request like any other, and its body is its body."""

GOLDEN = {**UPGRADE}
