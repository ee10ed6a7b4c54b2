"""Has a process of its own (`server.host.watch`) notice when the event loop of this one stops turning, and end this one then.

Three things are ready for that, none of which needs the interpreter or a turn of the loop: a pipe that the loop writes to
as long as it turns, a C handler with which a thread that gets SIGUSR1 writes its own stack (faulthandler), and a POSIX message
queue whose first message has libc call `_exit` on a thread of its own (mq_notify with SIGEV_THREAD). A signal could end the
process too, but not with a status that says what supervises it may start another.

Why no timer in this process, which needs no other: it would go off during SIGSTOP as well, as CLOCK_MONOTONIC goes on, and
end a process that does not hang.
"""

import asyncio
import ctypes
import faulthandler
import logging
import os
import secrets
import subprocess
import sys
import time
from contextlib import suppress

from engines.tensorrt.building.builds import search_path

from ..config.schema import ServerConfig
from .backoff import Backoff
from .exit_codes import NEEDS_RESTART
from .signals import blocked_in_children
from .watch import STACKS, Watched, interval

log = logging.getLogger("greenlane.watchdog")

_SIGEV_THREAD = 2
"""Of <signal.h>: have a function called on a thread of its own."""


class Watchdog:
    """Watches this process from `start` to `close`; with `server.watchdog` 0 it does nothing. Belongs to the event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._restarts = Backoff()
        self._task: asyncio.Task[None] | None = None
        self._queue = -1

    def __repr__(self) -> str:
        return f"<Watchdog {self._config.watchdog:g} s{', watching' if self._task else ''}>"

    def start(self) -> None:
        """Begin. The process that watches is started on the side."""
        if self._config.watchdog:
            faulthandler.register(STACKS, file=2, all_threads=False)
            self._queue = open_exit(NEEDS_RESTART)
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End, and return when nobody watches any more."""
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            faulthandler.unregister(STACKS)
            if self._queue >= 0:
                os.close(self._queue)

    async def _run(self) -> None:
        """Have somebody watch, and another one should that one end."""
        while True:
            self._restarts.started(time.monotonic())
            process = await asyncio.to_thread(self._start)
            try:
                await self._beat(process)
            finally:
                assert process.stdin
                process.stdin.close()
                await asyncio.shield(asyncio.to_thread(process.wait))
            pause = self._restarts.pause(time.monotonic())
            log.error(
                "the watchdog ended (status %d); starting another%s", process.returncode, f" in {pause:g} s" * bool(pause)
            )
            await asyncio.sleep(pause)

    def _start(self) -> "subprocess.Popen[bytes]":
        config = self._config
        watched = Watched(os.getpid(), config.watchdog, config.log_format, config.log_level, self._queue)
        with blocked_in_children():
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "server.host.watch", str(watched)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[self._queue] if self._queue >= 0 else [],
                env={**os.environ, "PYTHONPATH": search_path()},
                bufsize=0,
            )

    async def _beat(self, process: "subprocess.Popen[bytes]") -> None:
        """Write as long as somebody reads. A pipe that is full is one that is not read now, and says enough."""
        assert process.stdin
        beats = process.stdin.fileno()
        os.set_blocking(beats, False)
        while True:
            try:
                with suppress(BlockingIOError):
                    os.write(beats, b".")
            except BrokenPipeError:
                return
            await asyncio.sleep(interval(self._config.watchdog))


class _Attributes(ctypes.Structure):
    """struct mq_attr."""

    _fields_ = (
        ("flags", ctypes.c_long),
        ("most_messages", ctypes.c_long),
        ("message_size", ctypes.c_long),
        ("messages", ctypes.c_long),
        ("reserved", ctypes.c_long * 4),
    )


class _Event(ctypes.Structure):
    """struct sigevent: 64 bytes on Linux's 64-bit systems."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    )


def open_exit(status: int) -> int:
    """A message queue, as the descriptor that it is on Linux: the first message to it ends this process with this status.

    -1 where the system has none, which is a warning: then a process that hangs is killed, which says less. mq_overview(7).
    """
    libc, name = ctypes.CDLL(None, use_errno=True), f"/greenlane-{os.getpid()}-{secrets.token_hex(4)}".encode()
    attributes = _Attributes(0, 1, 1, 0)
    queue: int = libc.mq_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, ctypes.byref(attributes))
    if queue >= 0:
        libc.mq_unlink(name)  # Who has the descriptor needs no name.
        event = _Event(status, 0, _SIGEV_THREAD, ctypes.cast(libc._exit, ctypes.c_void_p), None)
        if libc.mq_notify(queue, ctypes.byref(event)) == 0:
            return queue
        os.close(queue)
    log.warning("no message queue (%s): should this process hang, it is killed by SIGKILL", os.strerror(ctypes.get_errno()))
    return -1
