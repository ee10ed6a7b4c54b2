"""Hands accepted connections from one process to another: a socket that carries descriptors (SCM_RIGHTS).

Each message names the process that the connection is for, and may carry the bytes that were already read from it.

What was sent stays in the receiver's socket until it is read. A process that has ended read no more, so the sender keeps a copy
of that socket, too, and takes out what is left there: no connection is lost that the process had not taken.
"""

import os
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

_MAX_NAME = 4096
"""Bytes of the longest name: a tenant's fits into a header."""
_MAX_DESCRIPTORS = 2
"""Descriptors in one message: the connection, and a memory file with the bytes read from it."""
_INTS = struct.Struct("i")
_FLAGS = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_MAX_READ_AHEAD = 16 << 20
"""Bytes of a file with what was read from a connection that are looked at: many times what is read at a time."""


class Handoff(NamedTuple):
    """A connection that is handed over, and the name of the process it is for.

    `read_ahead` is the descriptor of a memory file with the bytes that were already read from it; None if there are none.
    """

    name: str
    connection: socket.socket
    read_ahead: int | None = None

    def close(self) -> None:
        """Close this process's descriptors. Once it was sent, the receiver has copies, so the connection stays open."""
        self.connection.close()
        if self.read_ahead is not None:
            os.close(self.read_ahead)

    def data(self) -> bytes:
        """The bytes that were already read from the connection."""
        if self.read_ahead is None:
            return b""
        return os.pread(self.read_ahead, min(os.fstat(self.read_ahead).st_size, _MAX_READ_AHEAD), 0)


class Ends(NamedTuple):
    """Two connected sockets that handoffs can be sent over, in both directions: the dispatcher's, and an HTTP process's."""

    ours: socket.socket
    theirs: socket.socket

    def close(self) -> None:
        """Close this process's descriptors of both."""
        self.ours.close()
        self.theirs.close()


def pair() -> Ends:
    """Two new ones, non-blocking."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    return Ends(ours, theirs)


def memory_file(data: bytes) -> int:
    """The descriptor of a new memory file with these bytes. The caller closes it."""
    descriptor = os.memfd_create("greenlane-ahead")
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


def send(end: socket.socket, handoff: Handoff) -> None:
    """Send a handoff; the caller closes it. Raises BlockingIOError if there is no room, OSError if the peer is gone."""
    descriptors = [handoff.connection.fileno(), *([] if handoff.read_ahead is None else [handoff.read_ahead])]
    socket.send_fds(end, [handoff.name.encode()], descriptors)


def receive(end: socket.socket) -> Handoff | None:
    """The next handoff; None once the peer is gone. Raises BlockingIOError if there is none now.

    A connection for which this process has no descriptor left is closed and skipped, and so is what is no socket. Another
    process that has this end may have set it to block, or to deliver more than was sent: this neither blocks nor trusts that.
    """
    while True:
        try:
            name, extras, flags, _ = end.recvmsg(_MAX_NAME, socket.CMSG_SPACE(_MAX_DESCRIPTORS * _INTS.size), _FLAGS)
        except ConnectionError:  # The peer ended with messages unread.
            return None
        if not name:
            return None
        descriptors = [number for _, kind, data in extras if kind == socket.SCM_RIGHTS for (number,) in _INTS.iter_unpack(data)]
        if descriptors and not flags & socket.MSG_CTRUNC:
            with suppress(OSError):  # No socket.
                return Handoff(name.decode(errors="replace"), socket.socket(fileno=descriptors[0]), *descriptors[1:])
        for descriptor in descriptors:
            os.close(descriptor)
