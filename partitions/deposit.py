"""A descriptor that the first of some processes which needs it leaves for all others, with no process between to serve it.

It is a pair of sockets that all of these processes have, and a message that is never taken from it: who looks only peeks, which
gives a copy of its descriptor (unix(7); Linux copies descriptors then, too). So it does not matter which of them end, and when:
a message is there or it is not, and all see the same one first. What its descriptor is of exists as long as one of the sockets.
"""

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

_MOST = 256
"""Bytes of a label."""
_INT = struct.calcsize("i")


class Deposited(NamedTuple):
    """A descriptor, which the caller closes, and the label that it was left under."""

    label: str
    descriptor: int


class Deposit:
    """Both ends, as descriptors. Any thread; nothing blocks."""

    def __init__(self, leaving: socket.socket, looking: socket.socket) -> None:
        self._leaving = leaving
        self._looking = looking

    @property
    def descriptors(self) -> tuple[int, int]:
        """From copies of these another process makes the same by `deposit_of`."""
        return self._leaving.fileno(), self._looking.fileno()

    def look(self) -> Deposited | None:
        """What was left first, if anything was. Raises OSError, where the process may have no more descriptors too."""
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            data, extras, _, _ = self._looking.recvmsg(_MOST, socket.CMSG_SPACE(_INT), flags)
        except BlockingIOError:
            return None
        for level, kind, found in extras:
            if (level, kind, len(found)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT):
                return Deposited(data.decode(), struct.unpack("i", found)[0])
        raise OSError("what was left came without its descriptor: this process may have too many")

    def leave(self, label: str, descriptor: int) -> Deposited:
        """Leave a copy of this for all; returns what was left first, which may be another process's. Raises OSError."""
        with suppress(BlockingIOError):  # It is full of what others left.
            rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor)
            self._leaving.sendmsg([label.encode()], [rights], socket.MSG_DONTWAIT)
        found = self.look()
        assert found, "nothing takes messages out"
        return found

    def close(self) -> None:
        """Close this process's ends."""
        self._leaving.close()
        self._looking.close()


def open_deposit() -> Deposit:
    """An empty one. Raises OSError."""
    return Deposit(*socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))


def deposit_of(descriptors: Sequence[int]) -> Deposit:
    """The one with these descriptors, which it owns from now on."""
    leaving, looking = (socket.socket(fileno=each) for each in descriptors)
    return Deposit(leaving, looking)
