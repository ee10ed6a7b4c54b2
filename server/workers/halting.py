"""Halts the workers of tenants that move together, so that none of them waits for a long inference of another."""

import asyncio
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Protocol

from ..errors import Conflict
from .worker import Worker

SHORT_WORK = 0.01
"""Seconds for which a tenant that moves may have to wait for the inference of another that moves with it."""
_UNCHANGED = "; nothing was changed, and all tenants are served as before"


class Workers(Protocol):
    """Stops and resumes workers, one change of a tenant's worker at a time: `server.workers.worker_control.WorkerControl`."""

    @property
    def locks(self) -> Mapping[str, asyncio.Lock]:
        """Held while a tenant's worker is halted."""

    def stop(self, name: str, worker: Worker) -> "asyncio.Future[None]":
        """Begin to halt a tenant's worker."""

    def resume(self, name: str, halted: Worker) -> None:
        """Serve a tenant whose worker has halted by its current worker."""


class Halting:
    """Halts some tenants' workers. Every method belongs to the event loop.

    `settle` and then `halt`, both again as long as `halt` returns False; `end` at last, also after an error. Where tenants of
    several processes move together, all of them settle before one of them halts (`server.control.device_runtime`).
    """

    def __init__(self, control: Workers, workers: Mapping[str, Worker], max_pause: float) -> None:
        self._control = control
        self._workers = workers
        self._max_pause = max_pause
        self._until: float | None = None
        self._held: list[str] = []
        self._halting: dict[str, asyncio.Future[None]] = {}

    async def settle(self) -> None:
        """Wait until no inference has taken longer than SHORT_WORK; the tenants of such ones begin nothing new from now on.

        All others are served, also those that `halt` has halted. Raises Conflict, naming a tenant, if an inference does not end
        within `max_pause` of the first call.
        """
        if self._until is None:
            self._until = time.monotonic() + self._max_pause
            for name in self._workers:
                await hold(self._control.locks[name], name, self._max_pause)
                self._held.append(name)
        self._resume([name for name, halted in self._halting.items() if halted.done()])
        self._stop(await _busy(self._workers) if not self._halting else ())
        if late := await self._unfinished(self._until - time.monotonic()):
            names = f"tenant{'s' * (len(late) > 1)} {' and '.join(late)}"
            why = f"an inference has been running for {self._max_pause:g} s (server.max_pause)"
            raise Conflict(f"{names}: {why}{_UNCHANGED}")

    async def halt(self) -> bool:
        """Halt all of them, and return True when they have; False if one's inference turns out to take longer than SHORT_WORK.

        Then the others are served again; `settle` waits for it.
        """
        self._stop(self._workers)
        late = await self._unfinished(SHORT_WORK)
        if late:
            self._resume([name for name in self._halting if name not in late])
        return not late

    def end(self) -> None:
        """Serve all of them by their current workers, each as soon as it has halted."""
        held, self._held = self._held, []
        for name in held:
            halted = self._halting.pop(name, None)
            if halted is None:
                self._control.locks[name].release()
            elif halted.done():
                self._go_on(name)
            else:  # Before it has ended, two workers would read the link.
                halted.add_done_callback(partial(self._go_on, name))

    def _go_on(self, name: str, _: object = None) -> None:
        self._control.resume(name, self._workers[name])
        self._control.locks[name].release()

    def _stop(self, names: Collection[str]) -> None:
        self._halting |= {name: self._control.stop(name, self._workers[name]) for name in names if name not in self._halting}

    def _resume(self, names: Collection[str]) -> None:
        for name in names:
            del self._halting[name]
            self._control.resume(name, self._workers[name])

    async def _unfinished(self, seconds: float) -> list[str]:
        """Wait until all that are halting have halted, at most this long; those that have not."""
        if self._halting:
            await asyncio.wait(self._halting.values(), timeout=max(0.0, seconds))
        return [name for name, halted in self._halting.items() if not halted.done()]


async def hold(lock: asyncio.Lock, name: str, limit: float) -> None:
    """Acquire a lock of this tenant. Raises Conflict if it is not free within `limit` seconds."""
    try:
        async with asyncio.timeout(limit):
            await lock.acquire()
    except TimeoutError:
        why = "one of its models is being loaded or unloaded, or an inference does not end"
        raise Conflict(f"tenant {name}: {why}{_UNCHANGED}") from None


async def _busy(workers: Mapping[str, Worker]) -> list[str]:
    """The workers whose current work takes longer than SHORT_WORK."""
    before = {name: worker.oldest for name, worker in workers.items()}
    if all(serial is None for serial in before.values()):
        return []
    await asyncio.sleep(SHORT_WORK)
    return [name for name, worker in workers.items() if before[name] is not None and worker.oldest == before[name]]
