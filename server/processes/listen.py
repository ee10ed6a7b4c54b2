"""Opens the listening sockets. This is the first step of a start, so that a port in use is reported at once."""

import errno
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack

_BACKLOG = 2048


class CannotListen(Exception):
    """An address cannot be listened on; the text says why, and what to do."""


def listen(host: str, port: int, tenant_ports: Mapping[str, int]) -> tuple[list[socket.socket], dict[str, list[socket.socket]]]:
    """The sockets of the common port, one for each address of the host, and by tenant those of tenants' own ports.

    Raises CannotListen.
    """
    with ExitStack() as opened:
        common = _open(opened, host, port, "choose another with --port or server.port")
        own = {n: _open(opened, host, p, f"choose another as tenants.{n}.port") for n, p in tenant_ports.items()}
        opened.pop_all()
    return common, own


def url(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _open(opened: ExitStack, host: str, port: int, remedy: str) -> list[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
        return [opened.enter_context(_listener(family, address)) for family, address in addresses]
    except socket.gaierror as error:
        text = f"cannot listen on {host}:{port}: {_reason(error)}; choose another --host, or server.host"
        raise CannotListen(text) from error
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {_reason(error)}; {remedy}") from error


def _listener(family: int, address: object) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" means every address of this machine, those of IPv4 as well.
            every = isinstance(address, tuple) and address[0] == "::"
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not every)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program listens there"
    return error.strerror or os.strerror(error.errno or 0)
