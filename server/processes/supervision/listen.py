"""Opens the listening sockets. This is the first step of a start, so that a port in use is reported at once."""

import errno
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from ...config.tables import dotted

_BACKLOG = 2048
_HOST = "choose another --host, or server.host"


class CannotListen(Exception):
    """An address cannot be listened on; the text says why, and what to do."""


def listen(host: str, port: int, tenant_ports: Mapping[str, int]) -> tuple[list[socket.socket], dict[str, list[socket.socket]]]:
    """The sockets of the common port, one for each address of the host, and by tenant those of tenants' own ports.

    Raises CannotListen.
    """
    with ExitStack() as opened:
        common = _open(opened, host, port, "choose another with --port or server.port")
        own = {name: _open(opened, host, each, _remedy(name)) for name, each in tenant_ports.items()}
        opened.pop_all()
    return common, own


def bind_for(host: str, tenant: str, port: int) -> list[socket.socket]:
    """The sockets of a tenant's own port, for `begin` when the tenant is served: until then connections are refused.

    Raises CannotListen.
    """
    with ExitStack() as opened:
        own = _open(opened, host, port, _remedy(tenant), _reusable)
        opened.pop_all()
    return own


def begin(bound: Iterable[socket.socket]) -> None:
    """Accept connections on these sockets. Raises OSError if another program has begun to listen there meanwhile."""
    for each in bound:
        each.listen(_BACKLOG)
        each.setblocking(False)


def why_not(host: str) -> str:
    """Why nothing can listen on this host, and what to do; "" where it can. Blocks, as a name is looked up."""
    try:
        with ExitStack() as opened:
            _open(opened, host, 0, "choose another", _reusable)
    except CannotListen as error:
        return str(error).replace(f" {host}:0: ", f" {host}: ", 1)
    return ""


def _remedy(tenant: str) -> str:
    return f"choose another as {dotted(('tenants', tenant, 'port'))}"


def reserve(host: str, grpc_ports: Mapping[str, int]) -> list[socket.socket]:
    """Sockets that hold tenants' gRPC ports for their processes, which open sockets of their own. Raises CannotListen.

    Nothing is accepted on these. They share the ports, with programs of the same user only.
    """
    with ExitStack() as opened:
        held: list[socket.socket] = []
        for name, port in grpc_ports.items():
            remedy = f"choose another as {dotted(('tenants', name, 'grpc_port'))}"
            with ExitStack() as tried:  # To share a port would succeed where another server shares it too.
                _open(tried, host, port, remedy)
            held += _open(opened, host, port, remedy, _shared)
        opened.pop_all()
    return held


def url(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _open(
    opened: ExitStack, host: str, port: int, remedy: str, make: Callable[[int, tuple[Any, ...]], socket.socket] | None = None
) -> list[socket.socket]:
    make = make or _listener
    try:
        return [opened.enter_context(make(family, address)) for family, address in _resolve(host, port)]
    except (socket.gaierror, UnicodeError) as error:
        why = _reason(error) if isinstance(error, OSError) else "no name of a host"  # As one of 64 letters without a dot.
        raise CannotListen(f"cannot listen on {host}:{port}: {why}; {_HOST}") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = f"{host} is not an address of this machine: {_HOST}, such as 0.0.0.0 for all of its addresses"
        raise CannotListen(f"cannot listen on {host}:{port}: {_reason(error)}; {remedy}") from error


def _resolve(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """The family and address of each socket that listens on a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _listener(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = _reusable(family, address)
    try:
        begin([listener])
    except BaseException:
        listener.close()
        raise
    return listener


def _reusable(family: int, address: tuple[Any, ...]) -> socket.socket:
    return _bound(family, address, socket.SO_REUSEADDR)


def _shared(family: int, address: tuple[Any, ...]) -> socket.socket:
    return _bound(family, address, socket.SO_REUSEPORT)


def _bound(family: int, address: tuple[Any, ...], option: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            # "::" means every address of this machine, those of IPv4 as well.
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program listens there"
    return error.strerror or os.strerror(error.errno or 0)
