"""Sockets to listen on, opened before anything else is: so that a port that is taken is told at once."""

import errno
import os
import socket
from contextlib import ExitStack

from ..config.schema import Config

_BACKLOG = 2048


class Taken(Exception):
    """An address that cannot be listened on; the text says why, and what to do."""


def listen(config: Config) -> tuple[list[socket.socket], dict[str, list[socket.socket]]]:
    """The sockets of the common port, one for each address of the host, and likewise those of tenants' own ports.

    Raises Taken.
    """
    server = config.server
    with ExitStack() as opened:
        common = _open(opened, server.host, server.port, "choose another with --port or server.port")
        ports = {name: tenant.port for name, tenant in config.tenants.items() if tenant.port}
        own = {n: _open(opened, server.host, port, f"choose another as tenants.{n}.port") for n, port in ports.items()}
        opened.pop_all()
    return common, own


def address(listener: socket.socket) -> str:
    """Where it listens, as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _open(opened: ExitStack, host: str, port: int, remedy: str) -> list[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        places = dict.fromkeys((family, place) for family, _, _, _, place in found)
        return [opened.enter_context(_listener(family, place)) for family, place in places]
    except socket.gaierror as error:
        raise Taken(f"cannot listen on {host}:{port}: {_why(error)}; choose another --host, or server.host") from error
    except OSError as error:
        raise Taken(f"cannot listen on {host}:{port}: {_why(error)}; {remedy}") from error


def _listener(family: int, place: object) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            every = isinstance(place, tuple) and place[0] == "::"  # Every address of this machine, those of IPv4 as well.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not every)
        listener.bind(place)  # type: ignore[arg-type]
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program listens there"
    return error.strerror or os.strerror(error.errno or 0)
