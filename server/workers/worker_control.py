"""Halts tenants' workers and has them serve again: one change of a tenant's worker at a time."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial

from partitions import Device, PartitionError
from partitions.base import Closing

from ..config.schema import ConfigError
from ..config.tables import dotted
from ..errors import Conflict
from ..tenants.frontend import Frontend
from ..tenants.lifecycle import Lifecycle
from .worker import Endpoint, Worker

TOGETHER = 0.01
"""Seconds for which one who moves may be kept waiting by another's inference."""
_UNCHANGED = "; nothing was changed, and everyone is served as before"


class WorkerControl:
    """The link and the memory that each tenant's worker serves (`worker.Endpoint`). Every method belongs to the event loop.

    `source` names the configuration in errors, and `max_pause` is `server.max_pause` in seconds. `workers` are the current
    ones, by tenant; one is replaced there only while it is `halted`.
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
        """Of those who halt a tenant's worker and have one serve again: taken last, and for as long as that takes."""
        self._workers = workers
        self._lifecycle = lifecycle
        self._endpoints: dict[str, Endpoint] = {}

    def __repr__(self) -> str:
        halting = [name for name, lock in self.locks.items() if lock.locked()]
        return f"<WorkerControl of {', '.join(self._endpoints) or 'no tenant'}; being changed: {', '.join(halting) or 'none'}>"

    async def pin(self, device: Device, name: str) -> None:
        """Make a tenant's memory reachable for the device, before its worker serves. Raises ConfigError if it cannot be."""
        self._endpoints[name] = Endpoint(
            self._frontends[name].link, await asyncio.to_thread(self._pin, device, name, self._frontends[name])
        )

    @asynccontextmanager
    async def halted(self, workers: Mapping[str, Worker]) -> AsyncIterator[None]:
        """These tenants' workers are halted within; afterwards those that are theirs then serve, each once it can.

        Raises Conflict if one does not halt within `max_pause`: it is that one whose inference takes longer.
        """
        held: list[str] = []
        halting: dict[str, asyncio.Future[None]] = {}
        try:
            for name in workers:
                await hold(self.locks[name], name, self._max_pause)
                held.append(name)
            await self._halt(workers, halting)
            yield
        finally:
            for name in held:
                if name not in halting:
                    self.locks[name].release()
                elif halting[name].done():
                    self._go_on(name, workers[name])
                else:  # Two would read its link.
                    halting[name].add_done_callback(partial(self._go_on, name, workers[name]))

    async def _halt(self, workers: Mapping[str, Worker], halting: "dict[str, asyncio.Future[None]]") -> None:
        """Return when all of these have halted; `halting` is then what says so of each that was told to, also after an error.

        Those whose inferences take longer than TOGETHER are halted first. If another one's turns out to, those that have halted
        are served again until that has ended. Raises Conflict.
        """
        pause = self._max_pause
        until = time.monotonic() + pause
        late = await _busy(workers)
        while True:
            halting |= {name: asyncio.wrap_future(workers[name].stop()) for name in late if name not in halting}
            if longest := await _unfinished(halting, until - time.monotonic()):
                raise Conflict(f"{_an_inference(longest)} for {pause:g} s (server.max_pause){_UNCHANGED}")
            halting |= {name: asyncio.wrap_future(worker.stop()) for name, worker in workers.items() if name not in halting}
            if not (late := await _unfinished(halting, TOGETHER)):
                return
            for name in halting.keys() - set(late):
                del halting[name]
                self._resume(name, workers[name])

    def _go_on(self, name: str, halted: Worker, _: object = None) -> None:
        """Serve a tenant again whose worker has halted, and let others change that."""
        self._resume(name, halted)
        self.locks[name].release()

    def _resume(self, name: str, halted: Worker) -> None:
        halted.halt()
        if self._lifecycle.state != "closed":
            self.serve(name)

    async def replace_link(self, name: str, free: Callable[[], None]) -> None:
        """Stop a tenant's work in flight, have its worker serve the frontend's new link once that has ended, and call `free`.

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
        """A tenant's worker is halted within, once what it has in flight has ended, and serves again afterwards."""
        async with self.locks[name]:
            await _ended(self._workers[name])
            try:
                yield
            finally:
                self.serve(name)

    async def restart(self, name: str) -> bool:
        """Have a tenant's worker that failed serve again. Returns whether all its threads are at work.

        False also if the server was closed: then nothing is started.
        """
        async with self.locks[name]:
            if self._lifecycle.state == "closed":
                return False
            worker = self._workers[name]
            await _ended(worker)
            self.serve(name)
            return await asyncio.to_thread(worker.wait_until_started)

    def serve(self, name: str) -> None:
        """Have a tenant's worker of now, which is halted or new, serve, and tell its frontend the cores of its partition."""
        worker = self._workers[name]
        worker.serve(self._endpoints[name])
        self._frontends[name].set_cores(worker.partition.host_cores)

    def close(self) -> None:
        """Give up the pinned memory; no worker may be serving."""
        for endpoint in self._endpoints.values():
            endpoint.pinned.close()

    def _pin(self, device: Device, name: str, frontend: Frontend) -> Closing:
        """Blocks. Raises ConfigError."""
        memory = frontend.link.arena.memory
        try:
            return device.pin(memory.address, memory.nbytes)
        except PartitionError as error:
            key = dotted(("tenants", name, "memory"))
            text = f"the device cannot be made to reach {memory.nbytes} bytes of memory; lower it: {error}"
            raise ConfigError([f"{self._source}: {key}: {text}"]) from error


async def hold(lock: asyncio.Lock, name: str, limit: float) -> None:
    """Acquire a lock of this tenant. Raises Conflict if it is not free within `limit` seconds."""
    try:
        async with asyncio.timeout(limit):
            await lock.acquire()
    except TimeoutError:
        why = "a model of it is being loaded or unloaded, or an inference does not end"
        raise Conflict(f"tenant {name}: {why}{_UNCHANGED}") from None


async def _busy(workers: Mapping[str, Worker]) -> list[str]:
    """Those whose works take longer than TOGETHER now."""
    before = {name: worker.oldest for name, worker in workers.items()}
    if all(serial is None for serial in before.values()):
        return []
    await asyncio.sleep(TOGETHER)
    return [name for name, worker in workers.items() if before[name] is not None and worker.oldest == before[name]]


async def _unfinished(halting: Mapping[str, "asyncio.Future[None]"], seconds: float) -> list[str]:
    """Those that have not halted after so long, or sooner if all have."""
    if halting:
        await asyncio.wait(halting.values(), timeout=max(0.0, seconds))
    return [name for name, halted in halting.items() if not halted.done()]


async def _ended(worker: Worker) -> None:
    """Halt a worker, without a thread that waits for it."""
    await asyncio.shield(asyncio.wrap_future(worker.stop()))
    worker.halt()


def _an_inference(names: Collection[str]) -> str:
    return f"tenant{'s' * (len(names) > 1)} {' and '.join(names)}: an inference has been running"
