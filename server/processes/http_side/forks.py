"""What a process that a model's functions fork does not keep of the HTTP process: its ports, connections and channels.

A fork has every descriptor of its parent. It would hold the tenant's port after its parent's end, and no client would see the
end of a connection. Programs that are started otherwise get none of them.
"""

import os
import socket
from collections.abc import Collection, Set
from contextlib import suppress


def let_go_in_forks(ports: Set[int], descriptors: Collection[int]) -> None:
    """From now on each fork of this process replaces these descriptors, and all sockets of these ports, by /dev/null.

    `ports` may grow. For forks by Python; what a library forks in C has all of them until it ends.
    """
    os.register_at_fork(after_in_child=lambda: _let_go(ports, descriptors))


def _let_go(ports: Set[int], descriptors: Collection[int]) -> None:
    """Numbers stay in use, so that objects of the parent that are closed here close nothing else."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in (*descriptors, *_sockets(ports)):
        with suppress(OSError):
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _sockets(ports: Set[int]) -> list[int]:
    """The descriptors of this process that are sockets of TCP at these ports of its own."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            copy = socket.socket(fileno=number)
            try:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] in ports:
                    found.append(number)
            finally:
                copy.detach()
    return found
