"""The sockets of gRPC's connections, by the address of their client: gRPC gives neither the sockets nor a way to close one.

Each call looks at every descriptor of this process, a few microseconds each. None blocks.
"""

import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import unquote

_BYTES_ACKED = 120
"""Where Linux's struct tcp_info has tcpi_bytes_acked, of 64 bits."""


def acknowledged(port: int, peers: Collection[str]) -> dict[str, int]:
    """How many bytes the clients' systems have acknowledged so far, by `peers`, as `ServicerContext.peer` has them.

    A peer is missing whose connection has ended.
    """
    found = {}
    for peer, connection in _connections(port, peers):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
        if len(info) == _BYTES_ACKED + 8:
            (found[peer],) = struct.unpack_from("=Q", info, _BYTES_ACKED)
    return found


def shut_down(port: int, peer: str) -> None:
    """End the connection of a client in both directions: gRPC finds it closed, and drops what it has kept for it."""
    for _, connection in _connections(port, (peer,)):
        with suppress(OSError):  # Its client has closed it at this moment.
            connection.shutdown(socket.SHUT_RDWR)


def address(peer: str) -> tuple[str, int]:
    """Host and port of what gRPC calls a peer, such as `ipv4:127.0.0.1:50000` and `ipv6:%5B::1%5D:50000`."""
    host, _, number = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(number)


def _connections(port: int, peers: Collection[str]) -> Iterator[tuple[str, socket.socket]]:
    """The connections to a port of this process that `peers` have, each as a copy that is closed afterwards."""
    wanted = {address(peer): peer for peer in peers}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _copy(int(name)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port:
                host, number = copy.getpeername()[:2]
                if (peer := wanted.get((_plain(host), number))) is not None:
                    yield peer, copy


def _copy(descriptor: int) -> socket.socket:
    """A socket of this process again. Raises OSError if it is none, or is closed by now."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _plain(host: str) -> str:
    """An address as gRPC has it: one of IPv4 that came to a socket of IPv6 is one of IPv4, and scopes are left out."""
    address = ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
