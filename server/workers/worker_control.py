"""Halts and resumes tenants' workers, one change of a tenant's worker at a time; those that move together all at once, so that
none of them waits for a long inference of another.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

from partitions import Device, PartitionError
from partitions.base import Closing

from ..config.tables import ConfigError, dotted
from ..errors import Conflict
from ..tenants.frontend import Frontend, Lifecycle
from .session import Endpoint
from .worker import Worker

log = logging.getLogger("greenlane.worker")


SHORT_WORK = 0.01
"""Seconds for which a tenant that moves may have to wait for the inference of another that moves with it."""
_UNCHANGED = "; nothing was changed, and all tenants are served as before"


class Halting:
    """Halts some tenants' workers. Every method belongs to the event loop.

    `settle` and then `halt`, both again as long as `halt` returns False; `end` at last, also after an error. Where tenants of
    several processes move together, all of them settle before one of them halts (`server.control.device_runtime`).
    """

    def __init__(self, control: "WorkerControl", workers: Mapping[str, Worker], max_pause: float) -> None:
        self._control = control
        self._workers = workers
        self._max_pause = max_pause
        self._until: float | None = None
        self._held: list[str] = []
        self._halting: dict[str, Future[None]] = {}

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
        self._resume([name for name, halted in self._halting.items() if halted.done()])
        for name in held:
            if halted := self._halting.pop(name, None):  # Before it has ended, two workers would read the link.
                asyncio.wrap_future(halted).add_done_callback(partial(self._go_on, name))
            else:
                self._control.locks[name].release()

    def _go_on(self, name: str, _: object) -> None:
        self._control.resume({name: self._workers[name]})
        self._control.locks[name].release()

    def _stop(self, names: Collection[str]) -> None:
        self._halting |= {name: self._control.stop(name, self._workers[name]) for name in names if name not in self._halting}

    def _resume(self, names: Collection[str]) -> None:
        for name in names:
            del self._halting[name]
        self._control.resume({name: self._workers[name] for name in names})

    async def _unfinished(self, seconds: float) -> list[str]:
        """Wait until all that are halting have halted, at most this long; those that have not."""
        if waits_for := [halted for halted in self._halting.values() if not halted.done()]:
            await asyncio.wait({_all_done(waits_for)}, timeout=max(0.0, seconds))
        return [name for name, halted in self._halting.items() if not halted.done()]


def _all_done(futures: Collection[Future[None]]) -> asyncio.Future[None]:
    """Done when all of these are: only the last one wakes the event loop, which would take the interpreter from the others."""
    loop = asyncio.get_running_loop()
    all_done, others = loop.create_future(), count(len(futures) - 1, -1)

    def done(_: Future[None]) -> None:
        if not next(others) and not loop.is_closed():
            loop.call_soon_threadsafe(all_done.set_result, None)

    for each in futures:
        each.add_done_callback(done)
    return all_done


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


class WorkerControl:
    """Halts and resumes workers, and keeps the endpoint that each of them serves. Every method belongs to the event loop.

    `source` names the configuration in errors, and `max_pause` is `server.max_pause` in seconds. `workers` are the current
    ones, by tenant; a worker is replaced there only while it is halted (`Halting`).
    """

    def __init__(
        self,
        source: str,
        max_pause: float,
        frontends: Mapping[str, Frontend],
        workers: Mapping[str, Worker],
        lifecycle: Lifecycle,
    ) -> None:
        self._source = source
        self._max_pause = max_pause
        self._frontends = frontends
        self.locks = {name: asyncio.Lock() for name in frontends}
        """Held while a tenant's worker is halted and resumed; always the last lock that is taken."""
        self._workers = workers
        self._lifecycle = lifecycle
        self._endpoints: dict[str, Endpoint] = {}
        self._halted_at: dict[str, float] = {}
        self._paused: dict[str, float] = {}

    async def pin(self, device: Device, name: str) -> None:
        """Page-lock a tenant's tensor memory for the device, before its worker serves. Raises ConfigError."""
        self._endpoints[name] = Endpoint(
            self._frontends[name].link, await asyncio.to_thread(self._pin, device, name, self._frontends[name])
        )

    def add(self, name: str) -> None:
        """A tenant has come; `pin` its memory next."""
        self.locks[name] = asyncio.Lock()

    async def remove(self, name: str) -> None:
        """This tenant has gone, and its worker: release its page-locked memory."""
        self.locks.pop(name, None)
        if endpoint := self._endpoints.pop(name, None):
            await asyncio.to_thread(endpoint.pinned.close)

    def prepare(self, workers: Mapping[str, Worker]) -> None:
        """Have all that these workers need before they can serve in place of the current ones: threads, and graphs for the
        tickets that come. Blocks. On another thread, while no other worker takes the place of the current ones.
        """
        for name, worker in workers.items():
            worker.warm_up()
            if name in self._endpoints and (before := self._workers.get(name)):
                worker.take_over(self._endpoints[name], before)

    def halting(self, workers: Mapping[str, Worker]) -> Halting:
        """Halts these tenants' workers; nothing is done yet."""
        return Halting(self, workers, self._max_pause)

    def stop(self, name: str, worker: Worker) -> Future[None]:
        """Begin to halt a tenant's worker; `resume` it when the future is done. Its lock is held."""
        self._halted_at[name] = time.monotonic()
        return worker.stop()

    def paused(self, name: str) -> float:
        """The seconds for which a tenant was last halted: from when its worker took no more tickets until it served again."""
        return self._paused.get(name, 0.0)

    def resume(self, halted: Mapping[str, Worker]) -> None:
        """Serve tenants whose workers have halted by their current workers. Their locks are held.

        What need not be done before all of them are served again is done after it.
        """
        ended, serves = time.monotonic(), self._lifecycle.state != "closed"
        for name, worker in halted.items():
            worker.hand_over()
            if serves:
                self._workers[name].serve(self._endpoints[name])
            self._paused[name] = time.monotonic() - self._halted_at[name]
        for name, worker in halted.items():
            if serves and self._workers[name].partition.host_cores != worker.partition.host_cores:
                self._set_cores(name)
            spent = 1e3 * (ended - self._halted_at[name]), 1e3 * self._paused[name]
            log.debug("%s was paused: all was ready after %.2f ms, and it was served after %.2f", name, *spent)

    async def replace_link(self, name: str, free: Callable[[], None]) -> None:
        """Cancel a tenant's work in flight, have its worker serve the frontend's new link when that has ended, and call `free`.

        Does nothing after the server was closed.
        """
        self._workers[name].abandon()
        async with self.locks[name]:
            if self._lifecycle.state == "closed":
                return
            worker = self._workers[name]
            worker.abandon()
            await _ended(worker)
            self._endpoints[name] = self._endpoints[name]._replace(link=self._frontends[name].link)
            self.serve(name)
            free()

    @asynccontextmanager
    async def stopped(self, name: str) -> AsyncIterator[None]:
        """Halt a tenant's worker, once its work in flight has ended; it serves again at the end of the block."""
        async with self.locks[name]:
            await _ended(self._workers[name])
            try:
                yield
            finally:
                self.serve(name)

    async def restart(self, name: str) -> bool:
        """Restart a tenant's failed worker; whether all its threads started. False also if the server was closed."""
        async with self.locks[name]:
            if self._lifecycle.state == "closed":
                return False
            worker = self._workers[name]
            await _ended(worker)
            self.serve(name)
            return await asyncio.to_thread(worker.wait_until_started)

    def serve(self, name: str) -> None:
        """Start the tenant's current worker, which is halted or new, and set the frontend's cores to those of its partition."""
        self._workers[name].serve(self._endpoints[name])
        self._set_cores(name)

    def _set_cores(self, name: str) -> None:
        self._frontends[name].http_side.set_cores(self._workers[name].partition.host_cores)

    def close(self) -> None:
        """Release the page-locked memory; no worker may be serving."""
        for endpoint in self._endpoints.values():
            endpoint.pinned.close()

    def _pin(self, device: Device, name: str, frontend: Frontend) -> Closing:
        """Blocks. Raises ConfigError."""
        memory = frontend.link.arena.memory
        try:
            return device.pin(memory.address, memory.nbytes)
        except PartitionError as error:
            key = dotted(("tenants", name, "memory"))
            text = f"{memory.nbytes} bytes of memory cannot be page-locked for the device; lower it: {error}"
            raise ConfigError([f"{self._source}: {key}: {text}"]) from error


async def _ended(worker: Worker) -> None:
    """Halt a worker without blocking a thread meanwhile."""
    await asyncio.shield(asyncio.wrap_future(worker.stop()))
    worker.halt()
