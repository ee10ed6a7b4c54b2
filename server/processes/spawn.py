"""Processes as they are started and ended: forked off a small one that has the modules, and neither threads nor a device."""

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any

from ..host.signals import blocked_in_children
from ..link.ring import Descriptors
from .heartbeat import observe

log = logging.getLogger("greenlane.processes")

_UNKNOWN = 255
"""What multiprocessing says of a process when the one that it was forked off has ended."""
STOPPED = 2.0
"""Seconds for which what processes are forked off may be stopped."""


def _read_only(items: dict[str, Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType(items)


reduction.ForkingPickler.register(MappingProxyType, lambda table: (_read_only, (dict(table),)))


class Inherited:
    """A descriptor on its way to a process that is being started; it belongs to that process then."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> Any:
        return _detach, (reduction.DupFd(self.descriptor),)


def _detach(duplicate: Any) -> int:
    found: int = duplicate.detach()
    return found


def inherited(descriptors: Descriptors) -> Descriptors:
    """The same at the other end, where they are its own."""
    sent: Any = [Inherited(each) for each in descriptors[:4]]  # Numbers at the other end.
    arena, memory, tickets, completions = sent
    return Descriptors(arena, memory, tickets, completions, descriptors.slots, descriptors.nbytes)


def prepare() -> None:
    """Start what the processes are forked off, which takes a moment. Blocks, but not for that moment."""
    _context()
    resource_tracker.ensure_running()  # Its own start unblocks both signals, and `ensure_running` would begin with it.
    with blocked_in_children():
        forkserver.ensure_running()


async def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process that runs this function with these arguments, which may be sockets. Raises OSError or EOFError."""
    process = _context().Process(target=target, args=arguments, daemon=True)
    await asyncio.to_thread(_start, process)
    return process


def pin(process: BaseProcess, cores: Iterable[int]) -> None:
    """Let this process, which has one thread so far, run on these of the host's cores only, if that can be."""
    assert process.pid
    with suppress(OSError):  # It ended meanwhile, or this is not allowed: tenants' processes warn of that.
        os.sched_setaffinity(process.pid, cores)


def pin_threads(cores: Iterable[int]) -> None:
    """Let every thread of this process, and those they start, run on these of the host's cores only, if that can be."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):
            os.sched_setaffinity(int(thread), cores)


def end(process: BaseProcess, patience: float) -> None:
    """Wait for this process, and kill it if it takes more than so many seconds. Blocks."""
    process.join(patience)
    if process.exitcode is None:
        kill(process)
        process.join()


def kill(process: BaseProcess) -> None:
    """End this process at once, unless it is known to have ended. Of one whose origin is gone that is never known."""
    if process.pid and process.exitcode in (None, _UNKNOWN):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def manner(process: BaseProcess) -> str:
    """How it ended."""
    status = process.exitcode or 0
    return f"signal {-status}" if status < 0 else f"status {status}"


class Origin:
    """What processes are forked off, which also tells when one of them has ended: it is killed where it is stopped.

    `start` then raises EOFError, and the next begins with another. `look` belongs to one thread.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def __repr__(self) -> str:
        return f"<Origin {server()}>"

    @staticmethod
    def kill() -> None:
        """End it at once, if there is one. Any thread."""
        if (pid := server()) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def look(self, now: float) -> None:
        """Kill it if it has been stopped for too long at this time, in seconds."""
        pid = server()
        if pid is None or not observe(pid).stopped:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since > STOPPED:
            log.error("what processes are forked off has been stopped for %.1f s; killing it", now - self._since)
            self.kill()


def server() -> int | None:
    """Its process, which multiprocessing does not tell by any public name; None if there is none."""
    found: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return found


def _start(process: BaseProcess) -> None:
    with blocked_in_children():  # What it is forked off may have ended, and is started again then.
        process.start()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["server.__main__", "server.processes.forkserver_preload"])
    return context
