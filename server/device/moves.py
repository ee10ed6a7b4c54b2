"""Moves tenants of this process to other granules while they are served."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress

from partitions import Move, Partition, PartitionManager
from partitions import probe as probes
from partitions.plan import Granules

from ..control.descriptions import Paused
from ..facts import milliseconds
from ..workers.placement import Placement, close_all
from ..workers.worker import Worker
from ..workers.worker_control import Halting, WorkerControl, hold
from .placements import Placements
from .tenant_locks import TenantLocks

_REST = 0.001
"""Seconds after a switch for which the interpreter is left to the threads that serve from then on, before the move goes on."""
MakeWorker = Callable[[str, Placement], Worker]
"""Makes a tenant's worker, whose home is this placement."""


class PartitionMoves:
    """One move at a time: `prepare`, `settle`, `halt` and `commit`, or `discard`; see `server.control.device_runtime.Moves`.

    Belongs to the event loop. `workers` are the current ones, by tenant; `commit` replaces those of tenants that move. Their
    locks are held from `prepare` to the end of the move: their models do not change meanwhile.
    """

    def __init__(
        self,
        manager: PartitionManager,
        workers: dict[str, Worker],
        worker_control: WorkerControl,
        locks: TenantLocks,
        max_pause: float,
        make_worker: MakeWorker,
        placements: Placements,
    ) -> None:
        self._manager = manager
        self._workers = workers
        self._worker_control = worker_control
        self._tenant_locks = locks
        self._max_pause = max_pause
        self._make_worker = make_worker
        self._placements = placements
        self._taken: frozenset[str] = frozenset()
        """The tenants that move to a placement that was ready."""
        self._move = Move({}, {})
        self._prepared: dict[str, Worker] = {}
        self._locks = AsyncExitStack()
        self._halting: Halting | None = None

    @property
    def prepared(self) -> dict[str, Partition]:
        """The partitions that a prepared move makes, by tenant; none without one."""
        return {name: worker.partition for name, worker in self._prepared.items()}

    async def prepare(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int]]:
        """Make partitions and workers of these granules beside the old ones; the units that a probe ran on, by tenant.

        Raises PartitionError, or Conflict naming a tenant whose models are being changed for too long.
        """
        before = {name: partition.granules for name, partition in self._manager.held.items()}
        move = Move(before, {**before, **granules})
        async with AsyncExitStack() as locks:
            for name in move.movers:
                for lock in (self._tenant_locks.changing[name], self._tenant_locks.paging[name]):
                    with self._manager.device.loads.hurrying():
                        await hold(lock, name, self._max_pause)
                    locks.callback(lock.release)
            taken = {name: each for name in move.movers if (each := self._placements.of(name).ladder.take(move.after[name]))}
            rest = Move(before, {**before, **{name: move.after[name] for name in move.movers if name not in taken}})
            try:
                placed = {**(await asyncio.to_thread(self._place, rest) if rest.movers else {}), **taken}
            except BaseException:
                for name, placement in taken.items():
                    self._placements.of(name).ladder.put(placement)
                raise
            prepared = {name: self._make_worker(name, placement) for name, placement in placed.items()}
            with suppress(RuntimeError):  # There can be no more threads; when it is to serve, a worker tries again.
                await asyncio.to_thread(self._worker_control.prepare, prepared)
            self._prepared, self._taken = prepared, frozenset(taken)
            self._move, self._locks = move, locks.pop_all()
        return {name: placement.units for name, placement in placed.items()}

    async def settle(self) -> None:
        """Wait until none of the tenants that move, and are served already, has a long inference. Raises Conflict."""
        if self._halting is None:
            serving = {name: self._workers[name] for name in self._prepared if name in self._workers}
            self._halting = self._worker_control.halting(serving)
        await self._halting.settle()

    async def halt(self) -> bool:
        """Pause these tenants, and return True; False where one of them has a long inference now: then `settle` again."""
        return self._halting is not None and await self._halting.halt()

    async def commit(self) -> dict[str, Paused]:
        """Serve them from their new partitions, and close the old ones, or keep them ready; how long each was paused."""
        prepared, taken = self._prepared, self._taken
        self._manager.commit(self._move, {name: worker.partition for name, worker in prepared.items()})
        before = {name: self._workers[name] for name in prepared if name in self._workers}
        self._workers.update(prepared)
        self._prepared, self._taken = {}, frozenset()
        fenced = [name for name, old in before.items() if self._placements.of(name).fence.hand_over(old, prepared[name])]
        try:
            self._resume()
            for name in prepared.keys() - before.keys():
                self._worker_control.serve(name)
            await asyncio.sleep(_REST if before else 0)
            pauses = {name: Paused(milliseconds(self._worker_control.paused(name)), name in taken) for name in before}
            for name in fenced:
                await asyncio.to_thread(prepared[name].revoke)
            for name in taken:
                old = before.pop(name)
                await asyncio.to_thread(old.retire)
                self._placements.of(name).ladder.switched(old.home, prepared[name].partition.granules)
        finally:
            await self._end(before.values())
        return pauses

    async def switch(self) -> dict[str, Paused]:
        """`settle`, `halt` and `commit` at once."""
        await self.settle()
        while not await self.halt():
            await self.settle()
        return await self.commit()

    async def discard(self) -> None:
        """Serve them from their old partitions, and close the new ones. Does nothing without a move."""
        prepared, self._prepared = self._prepared, {}
        taken, self._taken = self._taken, frozenset()
        self._resume()
        for name in taken:
            worker = prepared.pop(name)
            await asyncio.to_thread(worker.retire)
            self._placements.of(name).ladder.put(worker.home)
        await self._end(prepared.values())

    def _resume(self) -> None:
        halting, self._halting = self._halting, None
        if halting is not None:
            halting.end()

    async def _end(self, left: Iterable[Worker]) -> None:
        try:
            await asyncio.to_thread(close_all, left)
        finally:
            await self._locks.aclose()

    def _place(self, move: Move) -> dict[str, Placement]:
        """New placements, with all models ready and the partitions probed; all or none. Blocks.

        The models of each tenant are set up on a separate thread.
        """
        carved = self._manager.carve(move)
        placed = {name: Placement(partition, {}) for name, partition in carved.items()}
        try:
            units = probes.locate(carved)
            probes.check(carved, units)
            with ThreadPoolExecutor(max(1, len(carved)), "rebinding") as threads:
                begun = [threads.submit(self._rebind, name, placement) for name, placement in placed.items()]
            for name, future in zip(placed, begun, strict=True):
                future.result()
                placed[name].units = units[name]
        except BaseException:
            close_all(placed.values())
            raise
        return placed

    def _rebind(self, name: str, placement: Placement) -> None:
        """Blocks."""
        before = self._workers.get(name)
        for key, executor in before.executors.items() if before else ():
            placement.executors[key] = executor.rebind(placement.partition)
