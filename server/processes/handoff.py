"""What connections are passed through: a socket that carries sockets, each with a name and what was read from it already."""

import os
import socket
import struct
from typing import NamedTuple

_NAME = 4096
"""Bytes of the longest name; a tenant's fits a header."""
_MOST = 2
"""Descriptors in one message: a connection, and a file in memory with what was read from it."""
_INT = struct.calcsize("i")


class Passed(NamedTuple):
    """A connection on its way, and for whom; `ahead` is the descriptor of what was read from it, if anything was."""

    name: str
    connection: socket.socket
    ahead: int | None = None

    def close(self) -> None:
        """Forget it here; where it was passed on to it goes on."""
        self.connection.close()
        if self.ahead is not None:
            os.close(self.ahead)

    def data(self) -> bytes:
        """What was read from it already."""
        return b"" if self.ahead is None else os.pread(self.ahead, os.fstat(self.ahead).st_size, 0)


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends; neither blocks."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(False)
    other.setblocking(False)
    return one, other


def write_down(data: bytes) -> int:
    """The descriptor of a file in memory with these bytes, however many."""
    descriptor = os.memfd_create("greenlane-ahead")
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


def give(end: socket.socket, passed: Passed) -> None:
    """Pass this on; it is the caller's to close. Raises BlockingIOError while there is no room, OSError if nobody is there."""
    descriptors = [passed.connection.fileno(), *([] if passed.ahead is None else [passed.ahead])]
    socket.send_fds(end, [passed.name.encode()], descriptors)


def take(end: socket.socket) -> Passed | None:
    """The next one; None once nobody is at the other end. Raises BlockingIOError if there is none now.

    One that this process has no descriptors left for is hung up on.
    """
    while True:
        try:
            name, extras, flags, _ = end.recvmsg(_NAME, socket.CMSG_SPACE(_MOST * _INT), socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:  # It ended with something unread.
            return None
        if not name:
            return None
        descriptors = [number for _, _, data in extras for (number,) in struct.iter_unpack("i", data)]
        if descriptors and not flags & socket.MSG_CTRUNC:
            return Passed(name.decode(), socket.socket(fileno=descriptors[0]), *descriptors[1:])
        for descriptor in descriptors:
            os.close(descriptor)
