"""Passes file descriptors to another of our processes at run time, beside the typed messages of `rpc`.

They go over a socket of their own (SCM_RIGHTS), right before the message that names them by a number, so they have arrived when
that message is handled. They go one way only: what the other process sends is never accepted, as HTTP processes parse bytes of
untrusted clients. Descriptors that were sent and not taken are closed with the next ones, or when either process ends.
"""

import os
import socket
import struct
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from ...accounts.usage import Count
from ...errors import Unavailable
from ...link.ring import Descriptors

_NUMBER = struct.Struct("<Q")
_INT = struct.calcsize("i")
MOST = 16
"""Descriptors that can be sent at once."""


class SentLink(NamedTuple):
    """A link, as a message has it: the number by which its descriptors were sent."""

    number: Count
    slots: Count
    nbytes: Count


class DescriptorSender:
    """The sending end. Belongs to the event loop."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.shutdown(socket.SHUT_RD)
        self._end = end
        self._numbers = count(1)

    def send(self, descriptors: Sequence[int]) -> int:
        """Send copies of these, which the caller may close afterwards; returns their number, for the message that follows.

        Raises Unavailable if the other process is gone, or has left too many of them untaken.
        """
        if not 0 < len(descriptors) <= MOST:
            raise ValueError(f"{len(descriptors)} descriptors; from 1 to {MOST} can be sent at once")
        number = next(self._numbers)
        try:
            socket.send_fds(self._end, [_NUMBER.pack(number)], descriptors)
        except OSError as error:
            raise Unavailable(f"the other process takes no descriptors: {error.strerror}") from error
        return number

    def send_link(self, link: Descriptors, *more: int) -> SentLink:
        """As `send`, the descriptors of a link, and these after them."""
        return SentLink(self.send([*link[:4], *more]), link.slots, link.nbytes)

    def close(self) -> None:
        self._end.close()


class DescriptorReceiver:
    """The receiving end. Belongs to the event loop."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    def take(self, number: int, expected: int) -> list[int]:
        """The descriptors of this number, which belong to the caller; those of earlier numbers are closed.

        Call it first of all when the message that names them is handled. Raises OSError if there are not so many of them: not
        sent, or beyond this process's limit of descriptors.
        """
        while True:
            found, descriptors = self._receive()
            if found == number and len(descriptors) == expected:
                return descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            if found >= number:
                raise OSError(f"{len(descriptors)} descriptors came with number {found}; expected {expected} with {number}")

    def take_link(self, sent: SentLink) -> Descriptors:
        """As `take`, the descriptors of this link."""
        arena, memory, tickets, completions = self.take(sent.number, 4)
        return Descriptors(arena, memory, tickets, completions, sent.slots, sent.nbytes)

    def close(self) -> None:
        self._end.close()

    def _receive(self) -> tuple[int, list[int]]:
        """The next number with its descriptors. Raises OSError, BlockingIOError if there are none."""
        space = socket.CMSG_SPACE(MOST * _INT)
        data, extras, _, _ = self._end.recvmsg(_NUMBER.size, space, socket.MSG_CMSG_CLOEXEC)
        descriptors = [
            descriptor
            for level, kind, found in extras
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for (descriptor,) in struct.iter_unpack("i", found[: len(found) // _INT * _INT])
        ]
        if len(data) != _NUMBER.size:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(f"a number of {len(data)} bytes; expected {_NUMBER.size}")
        return _NUMBER.unpack(data)[0], descriptors


def pair() -> tuple[DescriptorSender, socket.socket]:
    """A sender, and the socket of the receiver, which is to be given to another process and closed here."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return DescriptorSender(ours), theirs
