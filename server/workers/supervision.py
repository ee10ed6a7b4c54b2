"""Stops inferences that run for too long, starts workers again that failed, and tells tenants 503 meanwhile."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from ..host.backoff import Backoff
from ..link.messages import Failure
from ..tenants.frontend import Frontend
from ..tenants.lifecycle import Lifecycle
from .overruns import GIVING_UP, INTERVAL, Oldest
from .worker import Worker
from .worker_control import WorkerControl

log = logging.getLogger("greenlane.runtime")


class Supervision:
    """Looks after the workers of now, by tenant, from `start` to `close`. Every method belongs to the event loop."""

    def __init__(
        self,
        max_pause: float,
        limits: Mapping[str, tuple[float, str]],
        frontends: Mapping[str, Frontend],
        workers: Mapping[str, Worker],
        worker_control: WorkerControl,
        lifecycle: Lifecycle,
    ) -> None:
        self._max_pause = max_pause
        self._limits = limits
        self._frontends = frontends
        self._workers = workers
        self._worker_control = worker_control
        self._lifecycle = lifecycle
        self._mending: set[asyncio.Future[None]] = set()
        self._broken: set[str] = set()
        self._stuck: set[str] = set()
        self._oldest = {name: Oldest() for name in frontends}
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Supervision of {len(self._workers)} workers, {len(self._broken)} broken, {len(self._stuck)} stuck>"

    def start(self) -> None:
        """Look for inferences that run for too long from now on."""
        self._watching = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Look no more. Workers that are being started again end that by themselves, as the server is closed."""
        if self._watching:
            self._watching.cancel()

    async def replace_link(self, name: str, free: Callable[[], None] = lambda: None) -> None:
        """Serve the new link of the tenant's frontend once the work in flight from the old one has ended; then call `free`.

        It leads to the same memory, so the device reaches it already: pinning would stop every tenant. If that does not end
        in time this returns all the same, and the tenant is told 503 until it has.
        """
        moving = asyncio.ensure_future(self._worker_control.replace_link(name, free))
        self._mending.add(moving)
        moving.add_done_callback(self._mending.discard)
        if not (await asyncio.wait({moving}, timeout=self._max_pause))[0]:
            self.suspend(name, "what a process before had asked for is still running")
            moving.add_done_callback(lambda _: self.suspend(name, ""))

    def suspend(self, name: str, reason: str) -> None:
        """Tell a tenant's clients this until it is taken back with ""."""
        if reason:
            log.error("tenant %s is told 503: %s", name, reason)
        else:
            log.info("tenant %s is served again", name)
        self._frontends[name].suspend(reason)

    def restart_worker(self, name: str, error: Exception) -> None:
        """A tenant's worker failed with this: tell the tenant 503, and start the worker again until it wait_until_started."""
        if name not in self._broken:
            self._broken.add(name)
            self.suspend(name, f"the worker of tenant {name} failed, and is being started again: {error}")
            mending = asyncio.ensure_future(self._serve_again(name))
            self._mending.add(mending)
            mending.add_done_callback(self._mending.discard)

    async def _watch(self) -> None:
        """Look now and then how long everyone's inferences have been running, and stop those that take too long."""
        while True:
            await asyncio.sleep(INTERVAL)
            self._look_at_all(time.monotonic())

    def _look_at_all(self, now: float) -> None:
        """In a frame that ends, which keeps no worker that is replaced before the next look, and no memory of its models."""
        for name, worker in self._workers.items():
            serial = worker.oldest
            self._look(name, worker, serial, self._oldest[name].lasts(now, serial))

    def _look(self, name: str, worker: Worker, serial: int | None, seconds: float) -> None:
        """A tenant's oldest work has been running for so long."""
        limit, key = self._limits[name]
        late = bool(limit) and seconds > limit
        if name in self._stuck and not late:
            self._stuck.discard(name)
            self.suspend(name, "")
        elif late and serial is not None and seconds <= limit + GIVING_UP:
            text = f"the inference was stopped, as it had not ended in {limit:g} s, which is the limit ({key})"
            worker.overrun(serial, Failure("overrun", text))
        elif late and name not in self._stuck:
            self._stuck.add(name)
            self.suspend(name, f"an inference of tenant {name} cannot be stopped that has been running for {seconds:.0f} s")

    async def _serve_again(self, name: str) -> None:
        """Have a tenant's worker serve again that failed, as often as it takes."""
        restarts = Backoff()
        while self._lifecycle.state not in ("closed", "lost"):
            now = time.monotonic()
            restarts.started(now)
            await asyncio.sleep(restarts.delay(now))
            if await self._worker_control.restart(name):
                self._broken.discard(name)
                self.suspend(name, "")
                return
