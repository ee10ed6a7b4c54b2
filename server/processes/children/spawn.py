"""Starts and ends processes. They are forked from multiprocessing's forkserver, which has no threads and no device."""

import asyncio
import logging
import os
import select
import signal
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from threading import Event
from types import MappingProxyType
from typing import Any

from ...host import forkserver as early
from ...host.signals import blocked_in_children
from ...link.ring import Descriptors
from .heartbeat import observe

log = logging.getLogger("greenlane.processes")

_UNKNOWN = 255
"""The exit status that multiprocessing reports for a process whose forkserver has ended."""
MAX_STOPPED = 2.0
"""Seconds for which the forkserver may be stopped before it is killed."""


def _read_only(items: dict[str, Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType(items)


reduction.ForkingPickler.register(MappingProxyType, lambda table: (_read_only, (dict(table),)))


class Inherited:
    """A copy of a descriptor that is sent to a process while it starts. The descriptor itself may be closed, and its number be
    another's, before the process is forked.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)

    def __reduce__(self) -> Any:
        return _detach, (reduction.DupFd(self.descriptor),)


def _detach(duplicate: Any) -> int:
    found: int = duplicate.detach()
    return found


def inherited(descriptors: Descriptors) -> Descriptors:
    """The descriptors of a link in the form in which they can be an argument of `start`; the new process owns its copies."""
    sent: Any = [Inherited(each) for each in descriptors[:4]]  # They become numbers in the new process.
    arena, memory, tickets, completions = sent
    return Descriptors(arena, memory, tickets, completions, descriptors.slots, descriptors.nbytes)


def inherited_all(descriptors: Mapping[str, int]) -> dict[str, int]:
    """The same for descriptors by name."""
    sent: Any = {name: Inherited(each) for name, each in descriptors.items()}
    found: dict[str, int] = sent
    return found


def inherited_each(descriptors: Sequence[int]) -> list[int]:
    """The same for some in their order."""
    sent: Any = [Inherited(each) for each in descriptors]
    found: list[int] = sent
    return found


def prepare() -> None:
    """Start the forkserver, unless that was done early. Blocks, but does not wait until it has loaded its modules.

    Raises OSError.
    """
    early.start()


async def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start a process that calls this function with these arguments, which may be sockets. Raises OSError or EOFError.

    Sockets are in use until this returns. If it is cancelled, that may take as long as the forkserver needs to load its
    modules; then the process, if there is one, has been killed.
    """
    process, given_up = early.context().Process(target=target, args=arguments, daemon=True), Event()
    starting = asyncio.ensure_future(asyncio.to_thread(_start, process, given_up))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        given_up.set()
        await asyncio.gather(starting, return_exceptions=True)
        if process.pid:
            kill(process)
            await asyncio.to_thread(process.join)
        raise
    return process


def set_affinity(process: BaseProcess, cores: Iterable[int]) -> None:
    """Restrict this process, which has one thread so far, to these of the host's cores, if that can be done."""
    assert process.pid
    with suppress(OSError):  # It has ended, or this is not permitted, about which tenants' processes warn.
        os.sched_setaffinity(process.pid, cores)


def set_own_affinity(cores: Iterable[int]) -> None:
    """Restrict every thread of this process, and those they start later, to these of the host's cores, if that can be done.

    Not those that work on cores of others while these are idle, which are placed already.
    """
    seen: set[str] = set()
    while new := set(os.listdir("/proc/self/task")) - seen:  # A thread may start another one before it is restricted itself.
        seen |= new
        for thread in new:
            with suppress(OSError):
                if os.sched_getscheduler(int(thread)) != os.SCHED_IDLE:
                    os.sched_setaffinity(int(thread), cores)


def join(process: BaseProcess, timeout: float) -> None:
    """Wait for the end of this process, and kill it after `timeout` seconds. Blocks."""
    process.join(timeout)
    if process.exitcode is None:
        kill(process)
        process.join()
    elif process.exitcode == _UNKNOWN and process.pid:
        _join_orphan(process.pid, timeout)


def _join_orphan(process: int, timeout: float) -> None:
    """The same for a process whose forkserver has ended, which may go on."""
    try:
        descriptor = os.pidfd_open(process)
    except OSError:
        return
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        if not ended.poll(timeout * 1000):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            ended.poll()
    finally:
        os.close(descriptor)


def kill(process: BaseProcess) -> None:
    """Kill this process unless it is known to have ended; once its forkserver is gone, that cannot be known."""
    if process.pid and process.exitcode in (None, _UNKNOWN):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def exit_reason(process: BaseProcess) -> str:
    """How a process ended, for the log: `signal 9`, `status 1`."""
    status = process.exitcode or 0
    return f"signal {-status}" if status < 0 else f"status {status}"


class Forkserver:
    """The process that all others are forked from. It also reports their exit statuses, so it must not stay stopped.

    Once it was killed, `start` raises EOFError once, and the next `start` begins with a new one. `check` belongs to one thread.
    """

    def __init__(self) -> None:
        self._stopped_at: float | None = None

    @staticmethod
    def kill() -> None:
        """Kill it, if there is one, and all that is below it. Any thread."""
        early.kill_all()

    @staticmethod
    def end_orphans() -> None:
        """End what processes have started that have ended themselves. Blocks. Any thread."""
        early.end_orphans()

    def check(self, now: float) -> None:
        """Kill it if it has been stopped for too long at this time, in seconds."""
        pid = early.pid()
        if pid is None or not observe(pid).stopped:
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now
        elif now - self._stopped_at > MAX_STOPPED:
            log.error("the forkserver has been stopped for %.1f s; killing it", now - self._stopped_at)
            early.kill()


def _start(process: BaseProcess, given_up: Event) -> None:
    early.start()  # The forkserver may have ended.
    with early.forking, blocked_in_children():
        if not given_up.is_set():
            process.start()
