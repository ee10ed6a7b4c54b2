"""The sockets of gRPC's connections, by the address of their client: gRPC gives neither the sockets nor a way to close one.

Each call looks at every descriptor of this process, a few microseconds each. None blocks.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import unquote

_BYTES_ACKED, _BYTES_RECEIVED = 120, 128
"""Where Linux's struct tcp_info has tcpi_bytes_acked and tcpi_bytes_received, of 64 bits each."""
_NOWHERE = bytes(16)
"""A struct sockaddr of AF_UNSPEC."""
Address = tuple[str, int]
"""Host, without a scope, and port."""


def acknowledged(port: int, peers: Collection[str]) -> dict[str, int]:
    """How many bytes the clients' systems have acknowledged so far, by `peers`, as `ServicerContext.peer` has them.

    A peer is missing whose connection has ended.
    """
    wanted = {address(peer): peer for peer in peers}
    return {wanted[found]: _counted(connection, _BYTES_ACKED) for found, connection in _connections(port, wanted)}


def connections(port: int) -> dict[Address, int]:
    """All connections to a port of this process by their client's `address`, with the bytes that each has sent."""
    return {found: _counted(connection, _BYTES_RECEIVED) for found, connection in _connections(port)}


def reset(port: int, clients: Collection[Address]) -> None:
    """End the connections of clients at once: what they have sent and what they were sent is dropped."""
    for _, connection in _connections(port, clients):
        ctypes.CDLL(None).connect(connection.fileno(), _NOWHERE, len(_NOWHERE))


def shut_down(port: int, peer: str) -> None:
    """End the connection of a client in both directions: gRPC finds it closed, and drops what it has kept for it."""
    for _, connection in _connections(port, (address(peer),)):
        with suppress(OSError):  # Its client has closed it at this moment.
            connection.shutdown(socket.SHUT_RDWR)


def address(peer: str) -> Address:
    """Host and port of what gRPC calls a peer, such as `ipv4:127.0.0.1:50000` and `ipv6:%5B::1%5D:50000`."""
    host, _, number = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(number)


def _counted(connection: socket.socket, where: int) -> int:
    """A number of struct tcp_info; 0 from a kernel that does not count this."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, where + 8)
    return int(struct.unpack_from("=Q", info, where)[0]) if len(info) == where + 8 else 0


def _connections(port: int, wanted: Collection[Address] | None = None) -> Iterator[tuple[Address, socket.socket]]:
    """The connections to a port of this process that these clients have, or all, each as a copy that is closed afterwards."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _copy(int(name)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port:
                host, number = copy.getpeername()[:2]
                found = _plain(host), number
                if wanted is None or found in wanted:
                    yield found, copy


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
