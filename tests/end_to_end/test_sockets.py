"""Slow, unusual, invalid and disconnecting clients, over real sockets."""

import re
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import httpx
import pytest

from server.config.tenant import TenantConfig

from .fixtures import served_with
from .harness import PATIENCE, Served
from .wire import (
    BODY,
    FOREVER,
    PATH,
    SMALL,
    Connection,
    Document,
    binary,
    busy,
    chunked,
    client,
    failures,
    infer,
    lane,
    parts,
    post,
    post_binary,
    posted,
    request,
    spin,
    statistics,
    tensor,
    until,
)

LIMIT = 2**16
ENDLESS = 2**40
"""A Content-Length of which only a part is sent."""
BLOCK = bytes(2**18)
LOOKS_INSIDE = pytest.mark.parametrize("served", ["asgi", "direct"], indirect=True)


single = served_with(TenantConfig(name="acme", granules=1, models=("*",), queue=1, in_flight=1), max_body=LIMIT)
"""A server that runs one request at a time, lets one wait, and takes bodies of 64 KiB."""


@pytest.fixture
def one(single: Served) -> Iterator[httpx.Client]:
    with client(single) as http:
        yield http


def executions(http: httpx.Client, model: str) -> int:
    return statistics(http, model)["execution_count"]


def check(answer: Document) -> None:
    assert answer["outputs"][0]["data"] == [1, 2]


@pytest.mark.parametrize("part", [1, 20, 60, -len(BODY) - 1, -len(BODY), -len(BODY) + 1, -1])
def test_incomplete_request_is_not_executed(served: Served, http: httpx.Client, part: int) -> None:
    whole = posted("identity", SMALL)
    before, failed = executions(http, "identity"), failures(http)
    with Connection(served) as connection:
        connection.send(whole[:part])
    if -len(BODY) <= part < 0:  # A failure is counted once the headers were read.
        until(lambda: failures(http) == failed + 1)
    check(infer(http, "identity", SMALL).json())
    assert executions(http, "identity") == before + 1


def test_a_body_shorter_than_its_content_length_is_not_executed(served: Served, http: httpx.Client) -> None:
    before, failed = executions(http, "identity"), failures(http)
    with Connection(served) as connection:
        connection.send(post(PATH, BODY, length=len(BODY) + 1))
    until(lambda: failures(http) == failed + 1)
    assert executions(http, "identity") == before


def test_bytes_after_content_length_are_the_next_request(served: Served) -> None:
    with Connection(served) as connection:
        connection.send(post(PATH, BODY + b"\x00", length=len(BODY)))
        answer = connection.answer()  # Either a complete request, or an invalid one.
        assert answer.status in (200, 400)


def test_a_request_may_come_byte_by_byte(served: Served, http: httpx.Client) -> None:
    with Connection(served) as connection:
        for byte in posted("identity", SMALL):
            connection.send(bytes([byte]))
        check(connection.answer().json)


@LOOKS_INSIDE
def test_many_slow_clients_do_not_delay_others(served: Served, http: httpx.Client) -> None:
    whole = posted("identity", SMALL)
    with ExitStack() as stack:
        slow = [stack.enter_context(Connection(served)) for _ in range(50)]
        for connection in slow:
            connection.send(whole[:-1])
        check(infer(http, "identity", SMALL).json())
        assert used(served) == 0, "a slot is taken before the request is there"
        for connection in slow:
            connection.send(whole[-1:])
        for connection in slow:
            check(connection.answer().json)


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    counts = [2000, 0, 300, 0, 1, 500]
    with Connection(served) as connection:
        ahead = [posted("spin", spin(count, id=f"r{n}")) if count else b"" for n, count in enumerate(counts)]
        bad = posted("identity", request(id="bad"))
        connection.send(b"".join(data or bad for data in ahead))
        answers = [connection.answer() for _ in counts]
    assert [answer.status for answer in answers] == [200 if count else 400 for count in counts]
    assert [answer.json.get("id") for answer in answers] == ["r0", None, "r2", None, "r4", "r5"]


@pytest.mark.parametrize("served", ["direct"], indirect=True)
def test_disconnect_with_pipelined_requests_cancels_the_running_one(served: Served, http: httpx.Client) -> None:
    """Not under ASGI: uvicorn reports a disconnect only to the newest request of a connection."""
    before, failed, cancelled = executions(http, "identity"), failures(http, "spin"), cancellations(http)
    with Connection(served) as connection:
        connection.send(posted("spin", spin(FOREVER, parameters={"timeout": 2_000_000})) + posted("identity", SMALL))
        until(lambda: lane(http)["in_flight"] == 1)
    until(lambda: failures(http, "spin") == failed + 1 and lane(http)["abandoned"] == 0)
    assert cancellations(http) == cancelled + 1, "it was its deadline that stopped it"
    assert executions(http, "identity") == before


def cancellations(http: httpx.Client) -> float:
    """Requests for `spin` that ended because their clients disconnected."""
    pattern = r'nv_inference_request_failure{.*model="spin".*reason="CANCELED".*} (\S+)'
    found = re.search(pattern, http.get("/metrics").text)
    return float(found[1]) if found else 0


def test_a_client_that_expects_100_gets_it_before_it_sends_its_body(served: Served) -> None:
    with Connection(served) as connection:
        connection.send(post(PATH, b"", "Expect: 100-continue", length=len(BODY)))
        assert connection.answer().status == 100
        connection.send(BODY)
        check(connection.answer().json)


@pytest.mark.parametrize(("headers", "status"), [(["X-Tenant: nobody"], 401), ([], 413)])
def test_a_client_that_expects_100_is_refused_before_it_sends_its_body(single: Served, headers: list[str], status: int) -> None:
    with Connection(single) as connection:
        connection.send(post(PATH, b"", "Expect: 100-continue", *headers, length=ENDLESS))
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")


def test_refused_expect_100_closes_the_connection(served: Served) -> None:
    with Connection(served) as connection:
        connection.send(post(PATH, b"", "Expect: 100-continue", "X-Tenant: nobody", length=len(BODY)))
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (401, "close")


def test_body_in_thousands_of_one_byte_chunks(served: Served) -> None:
    body = BODY.ljust(5000)
    with Connection(served) as connection:
        for _ in range(2):
            connection.send(chunked(*(body[at : at + 1] for at in range(len(body)))))
            check(connection.answer().json)


def test_incomplete_chunked_body_is_not_executed(served: Served, http: httpx.Client) -> None:
    before, failed = executions(http, "identity"), failures(http)
    with Connection(served) as connection:
        connection.send(chunked(BODY, end=b""))
    until(lambda: failures(http) == failed + 1)
    assert executions(http, "identity") == before


def test_a_chunked_body_may_be_as_large_as_the_limit_and_no_larger(single: Served) -> None:
    for size, status in ((LIMIT, 200), (LIMIT + 1, 413), (LIMIT + 2**20, 413)):
        with Connection(single) as connection:
            body = BODY.ljust(size)
            connection.send(chunked(body[: LIMIT // 2], body[LIMIT // 2 :]))
            assert connection.answer().status == status


def test_a_body_may_be_as_large_as_the_limit_and_no_larger(single: Served) -> None:
    for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
        with Connection(single) as connection:
            connection.send(post(PATH, BODY.ljust(size)))
            assert connection.answer().status == status


LARGE = {
    401: post(PATH, b"", "X-Tenant: nobody", length=ENDLESS),
    404: post("/v2/models/nope/infer", b"", length=ENDLESS),
    405: post(PATH, b"", length=ENDLESS).replace(b"POST", b"PUT"),
    413: post(PATH, b"", length=ENDLESS),
}
"""Requests that are refused by their headers alone, by status."""


@pytest.mark.parametrize("status", LARGE)
def test_refused_large_body_is_answered_before_it_was_sent(single: Served, status: int) -> None:
    with Connection(single) as connection:
        connection.send(LARGE[status] + BLOCK)
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert answer.json["error"]
        assert not endures(connection)


def test_full_queue_is_429_before_a_large_body_was_sent(single: Served, one: httpx.Client) -> None:
    with busy(single, one), Connection(single) as waiting, Connection(single) as connection:
        waiting.send(posted("identity", SMALL))
        until(lambda: lane(one)["waiting"] == 1)
        connection.send(post(PATH, BLOCK, length=ENDLESS))
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (429, "close")
        assert not endures(connection)


def test_too_large_chunked_body_is_answered_before_it_was_sent(single: Served) -> None:
    with Connection(single) as connection:
        connection.send(chunked(*[BLOCK] * (LIMIT // len(BLOCK) + 1), end=b""))
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert not endures(connection, b"%x\r\n%b\r\n" % (len(BLOCK), BLOCK))


@pytest.mark.parametrize("status", LARGE)
def test_client_that_reads_only_after_a_send_blocks_gets_the_answer(single: Served, status: int) -> None:
    with Connection(single) as connection:
        connection.send(LARGE[status])
        assert not endures(connection)
        assert connection.answer().status == status


WHOLE = 2**25 - 2**10
"""Bytes of a body that is far over the limit, and beyond what sockets hold."""


@pytest.mark.parametrize("status", LARGE)
def test_client_that_sends_a_whole_refused_body_first_gets_the_answer(single: Served, status: int) -> None:
    with Connection(single) as connection:
        connection.send(LARGE[status].replace(b"%d" % ENDLESS, b"%d" % WHOLE) + bytes(WHOLE))
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert connection.ended()


def test_client_that_sends_a_whole_refused_chunked_body_first_gets_the_answer(single: Served) -> None:
    with Connection(single) as connection:
        connection.send(chunked(*[BLOCK] * (WHOLE // len(BLOCK))))
        assert connection.answer().status == 413
        assert connection.ended()


def test_refused_client_that_goes_silent_is_disconnected(single: Served) -> None:
    with Connection(single) as connection:
        connection.send(LARGE[413])
        assert connection.answer().status == 413
        assert connection.ended()


def test_refused_client_may_disconnect_at_once(single: Served, one: httpx.Client) -> None:
    for _ in range(20):
        with Connection(single) as connection:
            connection.send(LARGE[404])
    check(infer(one, "identity", SMALL).json())


def endures(connection: Connection, block: bytes = BLOCK) -> bool:
    """Whether the server reads half a gigabyte of a refused body."""
    try:
        for _ in range(2**29 // len(block)):
            connection.send(block)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def test_connection_is_kept_after_errors(single: Served) -> None:
    ahead = [
        (400, posted("identity", request())),
        (400, post(PATH, b"{")),
        (404, posted("nope", SMALL)),
        (401, posted("identity", SMALL, "X-Tenant: nobody")),
        (405, b"GET /v2/models/identity/infer HTTP/1.1\r\nHost: test\r\n\r\n"),
        (404, post("/v2/models/nope/infer", b" " * 100_000)),
        (415, posted("identity", SMALL, "Content-Encoding: br")),
        (504, posted("spin", spin(FOREVER, parameters={"timeout": 1000}))),
        (200, posted("identity", SMALL)),
    ]
    with Connection(single) as connection:
        for status, data in ahead:
            connection.send(data)
            assert connection.answer().status == status


def test_a_client_that_asks_to_close_is_closed_after_its_answer(served: Served) -> None:
    with Connection(served) as connection:
        connection.send(posted("identity", SMALL, "Connection: close"))
        check(connection.answer().json)
        assert connection.ended()


def large() -> bytes:
    """An inference whose body and answer have 240 KB."""
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    asked = binary(request(tensor("x", "FP32", [30_000, 2], binary_data_size=240_000), outputs=outputs), bytes(240_000))
    return post_binary(PATH, asked)


LAST = {
    "a head that is not HTTP": (b"nonsense\r\n\r\n", 400),
    "another version": (b"GET / HTTP/9.9\r\n\r\n", 400),
    "two hosts": (posted("identity", SMALL, "Host: b"), 400),
    "a damaged chunk": (chunked(b"{").removesuffix(b"0\r\n\r\n") + b"zz\r\n", 400),
    "a refused body": (post("/v2/models/nothing/infer", b"", length=3 << 20), 404),
    "Connection: close": (posted("identity", SMALL, "Connection: close"), 200),
    "HTTP/1.0": (posted("identity", SMALL).replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
}
"""Requests after which the connection is closed, and the status of their answer."""


@pytest.mark.parametrize("kind", LAST)
def test_a_close_destroys_no_answer_whatever_is_behind_it(served: Served, kind: str) -> None:
    """The client sends as much as it can before it reads."""
    data, status = LAST[kind]
    with Connection(served) as connection, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(connection.send, large() * 2 + data + large() * 4)
        with suppress(TimeoutError):
            sending.result(0.1)
        answers = [connection.answer() for _ in range(3)]
        assert [(answer.status, answer.headers["connection"]) for answer in answers] == [(200, None)] * 2 + [(status, "close")]
        assert connection.ended()
        with suppress(OSError):
            sending.result(PATIENCE)


def test_disconnect_while_queued_cancels_the_request(single: Served, one: httpx.Client) -> None:
    before, failed = executions(one, "identity"), failures(one)
    with busy(single, one):
        with Connection(single) as connection:
            connection.send(posted("identity", SMALL))
            until(lambda: lane(one)["waiting"] == 1)
        until(lambda: lane(one)["waiting"] == 0)
        assert failures(one) == failed + 1
        assert lane(one)["in_flight"] == 1
    check(infer(one, "identity", SMALL).json())
    assert executions(one, "identity") == before + 1


def test_disconnect_while_running_stops_the_work(single: Served, one: httpx.Client) -> None:
    before, failed = executions(one, "spin"), failures(one, "spin")
    with Connection(single) as connection:
        connection.send(posted("spin", spin(FOREVER)))
        until(lambda: lane(one)["in_flight"] == 1)
    until(lambda: failures(one, "spin") == failed + 1 and lane(one)["abandoned"] == 0)
    assert lane(one)["in_flight"] == 0
    assert executions(one, "spin") == before
    assert used(single) == 0


def test_clients_that_reset_their_connections_leave_nothing_behind(single: Served, one: httpx.Client) -> None:
    for _ in range(20):
        with Connection(single) as connection:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.send(posted("spin", spin(FOREVER)))
    until(lambda: lane(one)["in_flight"] == lane(one)["waiting"] == lane(one)["abandoned"] == 0)
    assert infer(one, "spin", spin(1)).status_code == 200
    assert used(single) == 0


@LOOKS_INSIDE
def test_client_that_does_not_read_its_answer_does_not_delay_others(served: Served, http: httpx.Client) -> None:
    data = bytes(range(256)) * (2**24 // 256)
    document = request(tensor("x", "FP32", [len(data) // 4, 1], binary_data_size=len(data)))
    sent = binary(document | {"parameters": {"binary_data_output": True}}, data)
    before = executions(http, "identity")
    with httpx.Client(base_url=served.url, timeout=PATIENCE) as slow, slow.stream("POST", PATH, **sent) as answer:
        assert executions(http, "identity") == before + 1
        assert used(served) == 0, "an unread answer holds its slot"
        check(infer(http, "identity", SMALL).json())
        answer.read()
        assert parts(answer)[1] == [data]


def used(served: Served) -> int:
    """Slots in use."""
    (tenant,) = served.service.tenants.values()
    return tenant.lane.slots.statistics().used
