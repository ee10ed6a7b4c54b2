"""From the first bytes of a connection to whose it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.config.tenant import TenantConfig
from server.processes.channels.routing import MAX_HEAD, SHARED, UNAUTHENTICATED, destination, process_for
from server.tenants.auth import Tenancy, digest

OPEN = TenantConfig(name="acme", granules=1, models=("*",))
KEYED = TenantConfig(name="globex", granules=1, models=("*",), keys_sha256=(digest("secret"),))
NOBODY = Tenancy([OPEN, KEYED], None)
DEFAULT = Tenancy([OPEN, KEYED], "acme")
INFER = "POST /v2/models/m/infer HTTP/1.1"


def head(first: str, *fields: str) -> bytes:
    return "\r\n".join([first, "Host: x", *fields, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (head(INFER, "X-Tenant: acme"), "acme"),
        (head(INFER, "x-tenant:acme"), "acme"),
        (head(INFER, "Authorization: Bearer secret"), "globex"),
        (head(INFER, "AUTHORIZATION:   bearer secret  "), "globex"),
        (head(INFER, "Authorization: Bearer secret", "X-Tenant: acme"), UNAUTHENTICATED),
        (head(INFER, "Authorization: Bearer wrong"), UNAUTHENTICATED),
        (head(INFER, "X-Tenant: globex"), UNAUTHENTICATED),
        (head(INFER, "X-Tenant: nobody"), UNAUTHENTICATED),
        (head(INFER), UNAUTHENTICATED),
        (head("GET /v2/health/ready HTTP/1.1"), SHARED),
        (head("GET /v2?a=b HTTP/1.1"), SHARED),
        (head("GET / HTTP/1.1"), SHARED),
        (head("GET /v2/health/ready HTTP/1.1", "Authorization: Bearer wrong"), UNAUTHENTICATED),
        (head("GET /v2/health/ready HTTP/1.1", "X-Tenant: acme"), "acme"),
        (head("GET /admin/tenants?a HTTP/1.1", "X-Tenant: acme"), SHARED),
        (head("GET /metrics HTTP/1.1", "Authorization: Bearer wrong"), SHARED),
        (b"\r\n" + head(INFER, "X-Tenant: acme"), "acme"),
        (b"POST\r\n\r\n", UNAUTHENTICATED),
        (b"GET /v2 HTTP/1.1\r\nno colon\r\nX-Tenant: acme\r\n\r\n", "acme"),
        (b"\x16\x03\x01\x02", UNAUTHENTICATED),
        (b"\0", UNAUTHENTICATED),
    ],
)
def test_destination_by_first_headers(data: bytes, where: str) -> None:
    assert destination(data, NOBODY) == where


def test_requests_without_a_tenant_go_to_the_default_tenant() -> None:
    assert destination(head(INFER), DEFAULT) == "acme"
    assert destination(head("GET /v2/health/ready HTTP/1.1"), DEFAULT) == "acme"
    assert destination(head(INFER, "Authorization: Bearer wrong"), DEFAULT) == UNAUTHENTICATED


@pytest.mark.parametrize("data", [b"", b"\r\n", b"P", b"POST / HTTP/1.1\r\nX-Tenant: acme", b"POST / HTTP/1.1\r\n\r"])
def test_more_has_to_come_while_the_headers_are_not_whole(data: bytes) -> None:
    assert destination(data, NOBODY) is None


def test_headers_that_are_too_long_go_to_the_unauthenticated_process() -> None:
    data = head(INFER, "X: " + "x" * MAX_HEAD, "X-Tenant: acme")
    assert destination(data, NOBODY) == UNAUTHENTICATED
    assert destination(data[: MAX_HEAD - 1], NOBODY) is None


@pytest.mark.parametrize(
    "data", [b"\r\n" + b"x" * MAX_HEAD, b"\r\n" * MAX_HEAD, b"\n" * MAX_HEAD], ids=["a line", "empty lines", "LF"]
)
def test_empty_lines_count_among_the_bytes_that_are_looked_at(data: bytes) -> None:
    assert destination(data, NOBODY) == UNAUTHENTICATED
    assert destination(data[: MAX_HEAD - 1], NOBODY) is None


LINES = st.lists(
    st.sampled_from(["X-Tenant: acme", "Authorization: Bearer secret", "Authorization: Bearer bad", "A: b", ":", "", "\x80"])
)


@given(
    LINES,
    st.sampled_from([INFER, "GET /admin HTTP/1.1", "GET / HTTP/1.1", "GET /v2 HTTP/1.1", "", "\x16"]),
    st.binary(max_size=50),
    st.data(),
)
def test_however_the_bytes_come_the_answer_is_the_same_once_there_is_one(
    lines: list[str], first: str, body: bytes, data: st.DataObject
) -> None:
    whole = head(first, *lines) + body
    known = destination(whole, NOBODY)
    for cut in data.draw(st.lists(st.integers(0, len(whole)), max_size=5)):
        assert destination(whole[:cut], NOBODY) in (None, known)


@given(st.binary(max_size=300))
def test_destination_takes_any_bytes(data: bytes) -> None:
    assert destination(data, NOBODY) in (None, SHARED, UNAUTHENTICATED, "acme", "globex")


@given(st.sampled_from([b"secret", b"wrong", b"\xff"]), st.sampled_from([None, b"acme", b"globex", b"\xff"]))
def test_a_request_that_was_parsed_belongs_where_its_bytes_do(key: bytes, name: bytes | None) -> None:
    fields = [b"authorization: Bearer " + key] + ([] if name is None else [b"X-Tenant: " + name])
    data = b"\r\n".join([INFER.encode(), *fields, b"", b""])
    parsed = {b"authorization": b"Bearer " + key} | ({} if name is None else {b"x-tenant": name})
    assert process_for(b"/v2/models/m/infer", parsed, NOBODY) == destination(data, NOBODY)
