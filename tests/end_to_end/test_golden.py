"""All forms of the server answer the same, byte by byte: the rows of `golden.py` over real sockets.

The forms are `python -m server` on CPU cores, the same with a device process and two HTTP processes, and
`uvicorn server.app:app`, with an option that needs ASGI for every request and without.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from server.tenants.auth import digest

from .golden import APP, GOLDEN, OK, Answer, Row, infer
from .processes import Running, configure, running, running_asgi, running_device, running_plain, tenant
from .wire import FOREVER, Connection, posted, spin

FORMS = {
    "server": running,
    "several": running_device,
    "uvicorn": running_plain,
    "asgi": running_asgi,
}
Start = Callable[[str, bool], Running]


@pytest.fixture(scope="module")
def start(standard: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Returns a server of one form, with keys and CORS or with neither, started on first use."""
    with ExitStack() as stack:

        @cache
        def start(form: str, keys: bool) -> Running:
            more = {"http_processes": 2} if form == "several" else {}
            tenants = tenant(**more, keys_sha256=[digest("secret")] if keys else [])
            settings = {"default_tenant": '"acme"'} | ({"cors_origins": f'["{APP}"]'} if keys else {})
            config = configure(tmp_path_factory.mktemp("golden") / "c.toml", standard, tenants, **settings)
            return stack.enter_context(FORMS[form](config))

        yield start


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("row", GOLDEN.values(), ids=GOLDEN)
def test_all_forms_answer_a_request_the_same(start: Start, form: str, row: Row) -> None:
    server = start(form, row.keys)
    with Connection(server) as connection:
        first, *rest = row.sent
        connection.send(first)
        for piece in rest:
            check(server, row)  # Everything sent before has been read by now.
            connection.send(piece)
        if row.shuts:
            connection.shut()
        for expected in row.answers:
            hear(connection, expected)
        if row.ends:
            assert connection.ended()
        else:
            connection.send(asked(row))
            hear(connection, OK)


def check(server: Running, row: Row) -> None:
    """Get a request on another connection answered."""
    with Connection(server) as other:
        other.send(asked(row))
        hear(other, OK)


def asked(row: Row) -> bytes:
    return infer(*(["Authorization: Bearer secret"] if row.keys else []))


def hear(connection: Connection, expected: Answer) -> None:
    """The next answer is the expected one."""
    answer = connection.answer(bare=expected.bare)
    assert len(answer.headers.get_all("connection", [])) <= 1
    if expected.field:
        assert expected.field in f"{answer.headers}".lower().splitlines()
    if answer.status < 400:
        assert answer.status == expected.status
        assert expected.text in answer.body.decode()
    else:
        assert (answer.status, json.loads(answer.body)["error"]) == (expected.status, expected.text)
        assert answer.headers["content-type"] == "application/json"


def test_disconnect_during_the_next_request_is_no_error(start: Start, form: str) -> None:
    """Found by fuzzing: the incomplete next request has no path yet."""
    server = start(form, False)
    with Connection(server) as connection:
        connection.send(posted("spin", spin(FOREVER)) + b"GET /v2 HT")
        connection.shut()
        assert connection.ended()
    with Connection(server) as connection:
        connection.send(infer())
        hear(connection, OK)
    assert "Traceback" not in "".join(server.log)
