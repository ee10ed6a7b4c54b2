"""Starts a watchdog process (`server.host.watch`) that ends this process when its event loop hangs.

The two processes share three things. When the loop hangs, none of them needs it or the GIL:
- a pipe, to which the event loop writes heartbeats; when none arrives, the watchdog acts
- a C handler of SIGUSR1 (faulthandler), with which the watchdog makes each thread of this process write its stack
- a POSIX message queue. When the watchdog sends it a message, libc calls `_exit` on a new thread of this process (mq_notify
  with SIGEV_THREAD). A signal could end the process too, but not with the exit status that asks for a restart.

A timer in this process instead of a second process would also fire after a SIGSTOP and SIGCONT, because CLOCK_MONOTONIC counts
the time between them, and would end a process that does not hang.
"""

import asyncio
import ctypes
import faulthandler
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress

from engines.children import search_path

from ..config.server import ServerConfig
from .backoff import Backoff
from .leaving import NEEDS_RESTART
from .signals import blocked_in_children
from .watch import EXIT, STACKS, Watched, interval, last_signal

log = logging.getLogger("greenlane.watchdog")

_SIGEV_THREAD = 2
"""From <signal.h>: call a function on a new thread."""


class Watchdog:
    """Watches this process while it is entered, or from `start` to `close`; with `server.watchdog` 0 it does nothing.

    Belongs to the event loop.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._backoff = Backoff()
        self._task: asyncio.Task[None] | None = None
        self._queue = -1

    async def __aenter__(self) -> None:
        self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Start watching. The watchdog process starts in the background."""
        if self._config.watchdog:
            faulthandler.register(STACKS, file=2, all_threads=False)
            self._queue = open_exit(NEEDS_RESTART)
            if os.getpid() == 1:
                exit_on(EXIT)
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop watching; returns when the watchdog process has ended."""
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            faulthandler.unregister(STACKS)
            if self._queue >= 0:
                os.close(self._queue)

    async def _run(self) -> None:
        """Keep a watchdog process running, and send it heartbeats."""
        while True:
            self._backoff.started(time.monotonic())
            process = await asyncio.to_thread(self._start)
            try:
                await self._beat(process)
            finally:
                assert process.stdin
                process.stdin.close()
                await asyncio.shield(asyncio.to_thread(process.wait))
            delay = self._backoff.delay(time.monotonic())
            log.error(
                "the watchdog ended (status %d); starting another%s", process.returncode, f" in {delay:g} s" * bool(delay)
            )
            await asyncio.sleep(delay)

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
        """Send heartbeats until the watchdog process ends. None is added to a full pipe, which holds enough unread ones."""
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
    """A message queue whose first message ends this process with this status, as a descriptor; see mq_overview(7).

    -1, after a warning, where the system has none: then a process that hangs is ended by a signal, without that status.
    """
    libc, name = ctypes.CDLL(None, use_errno=True), f"/greenlane-{os.getpid()}-{secrets.token_hex(4)}".encode()
    attributes = _Attributes(0, 1, 1, 0)
    queue: int = libc.mq_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, ctypes.byref(attributes))
    if queue >= 0:
        libc.mq_unlink(name)  # The descriptor is enough from here on.
        event = _Event(status, 0, _SIGEV_THREAD, ctypes.cast(libc._exit, ctypes.c_void_p), None)
        if libc.mq_notify(queue, ctypes.byref(event)) == 0:
            return queue
        os.close(queue)
    why, number = os.strerror(ctypes.get_errno()), signal.Signals(last_signal(os.getpid())).name
    log.warning("no message queue (%s): if this process hangs, it is ended by %s, not with status %d", why, number, status)
    return -1


def exit_on(number: int) -> None:
    """Have this signal end the process at once, with its number as status, also while a thread holds the GIL for ever."""
    libc = ctypes.CDLL(None)
    libc.signal(number, ctypes.cast(libc._exit, ctypes.c_void_p))
