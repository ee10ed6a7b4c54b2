"""Stops inferences that run for too long and restarts workers that failed; their tenants get 503 meanwhile."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from ..host.backoff import Backoff
from ..link.messages import Failure, Malformed
from ..tenants.frontend import Frontend, Lifecycle
from .worker import Worker
from .worker_control import WorkerControl

log = logging.getLogger("greenlane.runtime")

INTERVAL = 0.25
"""Seconds between two checks; a work may exceed its limit by as much."""
CANCEL_TIMEOUT = 5.0
"""Seconds that a cancelled work may go on before its tenant is suspended: a GPU kernel cannot be stopped."""


class OldestWork:
    """For how long a tenant's oldest work has been in flight. Measured by polling, so that inferences spend no time on it."""

    def __init__(self) -> None:
        self._serial: int | None = None
        self._since = 0.0

    def age(self, now: float, serial: int | None) -> float:
        """The seconds since `serial`, the oldest work now, was first seen as the oldest; 0 for None, which is no work."""
        if serial is None or serial != self._serial:
            self._serial, self._since = serial, now
        return now - self._since


class Supervision:
    """Supervises the current workers from `start` to `close`. Every method belongs to the event loop.

    `on_stuck` is called with the reason when the process has one tenant, and that has an inference that cannot be stopped. Only
    another process can serve the tenant then, and no other tenant is in this one.
    """

    def __init__(
        self,
        max_pause: float,
        limits: Mapping[str, tuple[float, str]],
        frontends: Mapping[str, Frontend],
        workers: Mapping[str, Worker],
        worker_control: WorkerControl,
        lifecycle: Lifecycle,
        on_stuck: Callable[[str], None],
    ) -> None:
        self._max_pause = max_pause
        self._limits = dict(limits)
        self._frontends = frontends
        self._workers = workers
        self._worker_control = worker_control
        self._lifecycle = lifecycle
        self._on_stuck = on_stuck
        self._restarting: set[asyncio.Future[None]] = set()
        self._failed: set[str] = set()
        self._distrusted: set[str] = set()
        """Those of them whose link was malformed."""
        self._stuck: set[str] = set()
        self._oldest = {name: OldestWork() for name in frontends}
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start checking for inferences that run for too long."""
        self._watching = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Stop checking. Restarts in progress end by themselves, because the server is closed."""
        if self._watching:
            self._watching.cancel()

    def add(self, name: str, limit: tuple[float, str]) -> None:
        """A tenant has come; `limit` is as in `limits`."""
        self._limits[name], self._oldest[name] = limit, OldestWork()

    def remove(self, name: str) -> None:
        """This tenant has gone, and its worker."""
        for found in (self._limits, self._oldest):
            found.pop(name, None)
        self._failed.discard(name)
        self._distrusted.discard(name)
        self._stuck.discard(name)

    async def replace_link(self, name: str, free: Callable[[], None] = lambda: None) -> None:
        """Serve the new link of the tenant's frontend once the work in flight from the old one has ended; then call `free`.

        The link has the same tensor memory, which is page-locked already: doing that again would stop every tenant. If the old
        work does not end within `max_pause` this returns all the same, and the tenant gets 503 until it has ended.
        """
        distrusted = name in self._distrusted
        self._distrusted.discard(name)
        if distrusted:
            self._failed.discard(name)
        replacing = asyncio.ensure_future(self._worker_control.replace_link(name, free))
        self._restarting.add(replacing)
        replacing.add_done_callback(self._restarting.discard)
        if not (await asyncio.wait({replacing}, timeout=self._max_pause))[0]:
            self.suspend(name, "an inference of the previous HTTP process is still running")
            replacing.add_done_callback(lambda _: self.suspend(name, ""))
        elif distrusted:
            self.suspend(name, "")

    def suspend(self, name: str, reason: str) -> None:
        """Answer all requests of a tenant 503 with this reason, until it is called with ""."""
        if reason:
            log.error("tenant %s suspended, its requests get 503: %s", name, reason)
        else:
            log.info("tenant %s is served again", name)
        self._frontends[name].http_side.suspend(reason)

    def restart_worker(self, name: str, error: Exception) -> None:
        """Suspend the tenant whose worker failed with this error, and restart the worker until it starts.

        If what it read in the link was malformed, it is restarted when that is replaced, with the process at the other end.
        """
        if name in self._failed:
            return
        self._failed.add(name)
        if isinstance(error, Malformed):
            self._distrusted.add(name)
            self.suspend(name, f"the HTTP process of tenant {name} sent a malformed message and is being replaced")
            self._frontends[name].http_side.distrust(str(error))
        else:
            self.suspend(name, f"the worker of tenant {name} failed and is being restarted: {error}")
            restarting = asyncio.ensure_future(self._restart_until_started(name))
            self._restarting.add(restarting)
            restarting.add_done_callback(self._restarting.discard)

    async def _watch(self) -> None:
        """Check every INTERVAL how long each tenant's oldest inference has been running, and stop those over their limit."""
        while True:
            await asyncio.sleep(INTERVAL)
            self._check_all(time.monotonic())

    def _check_all(self, now: float) -> None:
        """Not part of `_watch`, so that no local variable keeps a replaced worker and its models alive until the next check."""
        for name, worker in self._workers.items():
            serial = worker.oldest
            self._check(name, worker, serial, self._oldest[name].age(now, serial))

    def _check(self, name: str, worker: Worker, serial: int | None, seconds: float) -> None:
        """Stop the tenant's oldest work if it has been running for too long; suspend the tenant if it cannot be stopped."""
        limit, key = self._limits[name]
        late = bool(limit) and seconds > limit
        if name in self._stuck and not late:
            self._stuck.discard(name)
            self.suspend(name, "")
        elif late and serial is not None and seconds <= limit + CANCEL_TIMEOUT:
            text = f"the inference was stopped after {limit:g} s, its limit ({key})"
            worker.overrun(serial, Failure("overrun", text))
        elif late and name not in self._stuck:
            self._stuck.add(name)
            reason = f"an inference of tenant {name} has been running for {seconds:.0f} s and cannot be stopped"
            self.suspend(name, reason)
            if len(self._frontends) == 1:
                self._on_stuck(reason)

    async def _restart_until_started(self, name: str) -> None:
        """Restart a failed worker, with backoff, until it starts."""
        restarts = Backoff()
        while self._lifecycle.state not in ("closed", "lost"):
            now = time.monotonic()
            restarts.started(now)
            await asyncio.sleep(restarts.delay(now))
            if await self._worker_control.restart(name):
                self._failed.discard(name)
                self.suspend(name, "")
                return
