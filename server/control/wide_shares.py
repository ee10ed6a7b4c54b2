"""Decides who borrows from whom on every device, after each change of who has which granules."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from engines import EngineError
from partitions import DoesNotFit, Move, PartitionError

from ..config.tables import dotted
from ..config.tenant import TenantConfig
from ..errors import RequestError
from .controlled_device import ControlledDevice
from .stretch import WideState, plan_wide

log = logging.getLogger("greenlane.lending")


class WideShares:
    """Belongs to the controller's event loop. `changing` is held while granules change hands. Without a burst it does nothing.

    Plans are carried out in the background, since making executors takes a while: tenants are served meanwhile.
    """

    def __init__(
        self, tenants: Mapping[str, TenantConfig], devices: Sequence[ControlledDevice], changing: asyncio.Lock
    ) -> None:
        self._tenants = tenants
        self._devices = devices
        self._changing = changing
        self._any = any(tenant.burst for tenant in tenants.values())
        self._loaded = False
        self._work: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<WideShares {'; '.join(str(device.wide) for device in self._devices if device.wide) or 'none'}>"

    def begin(self, loaded: Callable[[], Awaitable[None]]) -> None:
        """Plan for the first time once all models are loaded."""
        if self._any:
            self._start(self._begin(loaded))

    def close(self) -> None:
        """Change nothing any more."""
        if self._work:
            self._work.cancel()
        self._any = False

    def reconfigure(self, tenants: Mapping[str, TenantConfig]) -> None:
        """Plan by these tables from now on. Where tenants borrow, none comes or goes."""
        self._tenants = tenants

    def check(self, counts: Mapping[str, int]) -> None:
        """Raise DoesNotFit if one of these tenants would get more granules than its burst allows."""
        for device in self._devices:
            for name, count in device.own(counts).items():
                burst = self._tenants[name].burst
                if burst is not None and count > (most := self._most(device, name)):
                    key = dotted(("tenants", name, "burst"))
                    raise DoesNotFit(f"{name}: {count} granules, but {key} allows {most} at most; raise that, or ask for less")

    async def narrow(self, moves: Sequence[tuple[ControlledDevice, Move]]) -> None:
        """Before a move: have tenants that borrow granules which change hands use their home partitions alone.

        Raises Conflict if a work of one of them takes longer than `max_pause`. `remake` ends this.
        """
        for device, move in moves:
            changed = {each for name in move.movers for each in (*move.before.get(name, ()), *move.after.get(name, ()))}
            names = [
                name for name, wide in device.wide.items() if name not in move.movers and changed.intersection(wide.granules)
            ]
            for runtime in device.distinct(names) if names else ():
                await runtime.widths.narrow([name for name in names if device.runtimes.get(name) is runtime])

    def remake(self) -> None:
        """Granules have changed hands, or could not: plan again, in the background."""
        if self._any and self._loaded:
            self._start(self._remake(self._work))

    async def states(self) -> list[WideState]:
        """Every tenant's wide partition, planned or made, as its device side reports it."""
        found: list[WideState] = []
        for device in self._devices if self._any else ():
            for runtime in device.distinct():
                try:
                    found += await runtime.widths.stretches()
                except RequestError:  # It is being started again, and has none.
                    continue
        return found

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = asyncio.create_task(work)
        self._work.add_done_callback(_log_failure)

    async def _begin(self, loaded: Callable[[], Awaitable[None]]) -> None:
        await loaded()
        self._loaded = True
        await self._remake(None)

    async def _remake(self, before: "asyncio.Task[None] | None") -> None:
        if before and not before.done():
            await asyncio.wait({before})
        async with self._changing:
            for device in self._devices:
                if device.held:
                    await self._stretch(device)

    async def _stretch(self, device: ControlledDevice) -> None:
        homes = {name: partition.granules for name, partition in device.held.items()}
        most = {name: self._most(device, name) for name in homes if self._tenants[name].burst is not None}
        plans = plan_wide(homes, most, {name: self._tenants[name].lend for name in homes})
        device.wide = plans
        for runtime in device.distinct():
            try:
                await runtime.widths.stretch(device.of(runtime, plans))
            except (RequestError, EngineError, PartitionError) as error:  # It gets the plan when it is started again.
                log.warning("no wide partitions for now: %s", error)

    def _most(self, device: ControlledDevice, name: str) -> int:
        """The granules that a tenant may use at a time on this device. Where its burst does not fit: all that there are."""
        total = len(device.info.granules)
        return min(total, self._tenants[name].most(device.info.unit, device.info.granules)) if total else 0


def _log_failure(work: "asyncio.Task[None]") -> None:
    if not work.cancelled() and (error := work.exception()):
        log.error("wide partitions could not be changed: %s", error, exc_info=error)
