"""Sockets to listen on, and what is said when there are none to be had."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from server.processes.supervision.listen import CannotListen, listen, reserve, url

LOOPBACK = "127.0.0.1"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def taken(stack: ExitStack) -> int:
    holder = stack.enter_context(socket.create_server((LOOPBACK, 0)))
    port: int = holder.getsockname()[1]
    return port


def test_connections_can_be_made_before_they_are_accepted(stack: ExitStack) -> None:
    (listener,), own = listen(LOOPBACK, 0, {})
    stack.enter_context(listener)
    assert own == {}
    assert not listener.getblocking()
    stack.enter_context(socket.create_connection(listener.getsockname()))
    assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_tenant_may_have_a_socket_of_its_own(stack: ExitStack) -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    (listener,), own = listen(LOOPBACK, 0, {"acme": port})
    stack.enter_context(listener)
    (theirs,) = own["acme"]
    stack.enter_context(theirs)
    assert theirs.getsockname()[1] == port


def test_an_ipv6_url_has_brackets(stack: ExitStack) -> None:
    try:
        (listener,), _ = listen("::1", 0, {})
    except CannotListen:
        pytest.skip("this machine has no IPv6")
    stack.enter_context(listener)
    assert url(listener).startswith("http://[::1]:")


def test_a_port_in_use_is_reported_with_what_to_do(stack: ExitStack) -> None:
    port = taken(stack)
    with pytest.raises(CannotListen) as told:
        listen(LOOPBACK, port, {})
    expected = f"cannot listen on 127.0.0.1:{port}: another program listens there; choose another with --port or server.port"
    assert str(told.value) == expected


def test_a_tenants_port_in_use_names_its_key_and_closes_the_others(stack: ExitStack) -> None:
    port = taken(stack)
    with pytest.raises(CannotListen, match=r"choose another as tenants\.acme\.port"):
        listen(LOOPBACK, 0, {"acme": port})


def test_a_reserved_port_may_be_listened_on_by_those_who_share_it_only(stack: ExitStack) -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    (holder,) = reserve(LOOPBACK, {"acme": port})
    stack.enter_context(holder)
    with pytest.raises(OSError, match="in use"):
        socket.create_server((LOOPBACK, port))
    server = stack.enter_context(socket.create_server((LOOPBACK, port), reuse_port=True))
    for _ in range(8):  # Connections come to the one that listens; the other would keep or refuse some.
        stack.enter_context(socket.create_connection((LOOPBACK, port)))
        stack.enter_context(server.accept()[0])


@pytest.mark.parametrize("shared", [False, True])
def test_a_grpc_port_in_use_names_its_key_even_if_it_is_shared(stack: ExitStack, shared: bool) -> None:
    port = stack.enter_context(socket.create_server((LOOPBACK, 0), reuse_port=shared)).getsockname()[1]
    with pytest.raises(CannotListen, match=r"another program listens there; choose another as tenants\.acme\.grpc_port"):
        reserve(LOOPBACK, {"acme": port})


def test_a_foreign_host_is_named_and_not_its_port() -> None:
    remedy = (
        "192.0.2.1 is not an address of this machine: choose another --host, or server.host, such as 0.0.0.0 for all of its"
    )
    for tenants in ({}, {"acme": 0}):
        with pytest.raises(CannotListen) as refused:
            listen("192.0.2.1", 0, tenants)
        assert remedy in str(refused.value)
        assert "port" not in str(refused.value)
    with pytest.raises(CannotListen, match=r"192\.0\.2\.1 is not an address of this machine"):
        reserve("192.0.2.1", {"acme": 0})


def test_an_unknown_host_is_reported_with_the_systems_text() -> None:
    with pytest.raises(CannotListen, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign requested address"):
        listen("192.0.2.1", 0, {})
    with pytest.raises(CannotListen, match=r"cannot listen on no\.such\.host\.invalid:0: "):
        listen("no.such.host.invalid", 0, {})


def test_every_address_of_ipv6_is_every_address_of_ipv4_too_and_another_is_not(stack: ExitStack) -> None:
    try:
        (every,), _ = listen("::", 0, {})
        (one,), _ = listen("::1", 0, {})
    except CannotListen:
        pytest.skip("this machine has no IPv6")
    for listener in (every, one):
        stack.enter_context(listener)
    port = every.getsockname()[1]
    for host in ("127.0.0.1", "::1"):
        stack.enter_context(socket.create_connection((host, port)))
    assert one.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
