"""What comes between the end of a process and the start of the next one: waiting, counting, and further attempts."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from itertools import chain, repeat
from multiprocessing.process import BaseProcess
from typing import Any

from partitions import PartitionError

from ...host.backoff import Backoff
from ..children import spawn

log = logging.getLogger("greenlane.processes")

EXIT_TIMEOUT = 5.0
"""Seconds that a process may take to end after it was asked to: more than `http.body.CLOSE_SECONDS`, which it gives
clients that do not read their answers."""
_MAX_PAUSE = 10.0
"""Seconds between two attempts to start a process for which there may be no memory."""


class Restarts:
    """The restarts of one server's processes. Belongs to the event loop.

    Nothing is started any more once `closing` is set. `counts` says how often each process ended unexpectedly, by its name in
    the log.
    """

    def __init__(self, counts: MutableMapping[str, int] | None = None) -> None:
        self.closing = asyncio.Event()
        self.counts: MutableMapping[str, int] = {} if counts is None else counts

    async def wait_for_end(
        self, process: BaseProcess | None, label: str, backoff: Backoff, ended: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until this process has ended, call `ended`, and then wait for as long as `backoff` says."""
        assert process
        await asyncio.to_thread(spawn.join, process, EXIT_TIMEOUT)
        await asyncio.to_thread(spawn.Forkserver.end_orphans)
        ended()
        self.counts[label] = self.counts.get(label, 0) + 1
        delay = backoff.delay(time.monotonic())
        log.error("%s ended (%s); starting another%s", label, spawn.exit_reason(process), f" in {delay:g} s" if delay else "")
        await self.sleep(delay)

    async def retry(self, start: Callable[[], Awaitable[None]]) -> None:
        """Start a process, in as many attempts as it takes: the second at once, as the forkserver may just have ended."""
        for pause in chain((0.0,), repeat(_MAX_PAUSE)):
            if self.closing.is_set():
                return
            try:
                await start()
                return
            except (OSError, EOFError, PartitionError) as error:  # No memory, descriptors or process ids may be left.
                when = f"in {pause:g} s" if pause else "at once"
                log.error("no process can be started now (%s); trying again %s", error, when)
                await self.sleep(pause)

    async def sleep(self, seconds: float) -> None:
        """Sleep, but not beyond the moment at which the server closes."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.closing.wait(), seconds)


class WatchTasks:
    """Tasks that watch processes until these are not needed any more; one that fails is logged. Belongs to the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.add(asyncio.create_task(work))

    def add(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)

    async def wait(self, limit: float) -> None:
        """Wait until all have ended, at most so many seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()):
        log.critical("a process is no longer watched: %s", error, exc_info=error)
