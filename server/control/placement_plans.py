"""Decides which placements tenants have beside their homes on every device, after each change of who has which granules."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from engines import EngineError
from partitions import DoesNotFit, Move, PartitionError
from partitions.health import cores_of, spelled
from partitions.plan import Granules, rung
from partitions.resctrl import CoreGroups, CoreShare, Held

from ..config.bandwidth import too_much
from ..config.tables import dotted
from ..config.tenant import TenantConfig
from ..errors import RequestError
from .controlled_device import ControlledDevice
from .descriptions import Beside, ReadyShare
from .device_runtime import DeviceRuntime
from .fence import Fence, core_shares, plan_fences
from .stretch import Wide, plan_wide

fence_log = logging.getLogger("greenlane.fence")
ladder_log = logging.getLogger("greenlane.ladder")
AGAIN = 10.0
"""Seconds after which cores are held again that another program kept from being held."""
_FAILURES = (RequestError, EngineError, PartitionError)
"""What a device side answers that cannot do what is planned. One that is started again gets the plan then."""


class PlacementPlans:
    """Belongs to the controller's event loop. `changing` is held while granules change hands.

    Plans are carried out in the background, as it takes a while to make executors: tenants are served meanwhile. A plan takes
    the place of the one before, also if that is not carried out yet. Without a burst, a ladder and a fence nothing is planned.
    """

    def __init__(
        self, tenants: Mapping[str, TenantConfig], devices: Sequence[ControlledDevice], changing: asyncio.Lock
    ) -> None:
        self._tenants = tenants
        self._devices = devices
        self._changing = changing
        self._logged: dict[str, list[ReadyShare]] = {}
        """What was ready for a move when the last plan was carried out, by tenant."""
        self._placing: set[str] = set()
        """Devices with a fence or a wide partition that was sent, and not taken back."""
        self._loaded = False
        self._work: asyncio.Task[None] | None = None
        self.cores = CoreGroups()
        """Holds tenants' cores to shares of memory bandwidth, from here, as tenants' own processes must not change that; and
        counts what cores move.
        """
        self._thread = ThreadPoolExecutor(1, "resctrl")
        """The only one to use `cores`, so what is held last is what was planned last."""
        self._again: asyncio.TimerHandle | None = None

    def begin(self, loaded: Callable[[], Awaitable[None]]) -> None:
        """Plan for the first time once all models are loaded."""
        self._thread.submit(self.cores.hold, {})  # Removes what a server left that was killed.
        if self._needed or self._core_shares():
            self._start(self._begin(loaded))

    def close(self) -> None:
        """Change nothing any more."""
        self._loaded = False
        for each in (self._work, self._again):
            if each:
                each.cancel()

    async def free_cores(self) -> None:
        """Hold no cores any more, after `close`."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self.cores.close)

    def reconfigure(self, tenants: Mapping[str, TenantConfig]) -> None:
        """Plan for these tenants from now on; some may have come or gone, but none where tenants borrow."""
        self._tenants = tenants
        self._logged = {name: each for name, each in self._logged.items() if name in tenants}
        self._loaded = self._loaded or (self._needed and self._work is None)
        self.remake()

    def check(self, device: ControlledDevice, after: Mapping[str, Granules]) -> None:
        """Raise DoesNotFit if, with all of a device's granules so, shares of bandwidth would be too much, or a tenant that has
        granules there would get more than its burst allows.
        """
        for problem in too_much(self._tenants, after, device.info.granules, device.info.bandwidth):
            raise DoesNotFit(problem)
        for name in device.held:
            count, burst = len(after[name]), self._tenants[name].burst
            if burst is not None and count != device.counts[name] and count > (most := self._most(device, name)):
                key = dotted(("tenants", name, "burst"))
                raise DoesNotFit(f"{name}: {count} granules, but {key} allows {most} at most; raise that, or ask for less")

    async def narrow(self, moves: Sequence[tuple[ControlledDevice, Move]]) -> None:
        """Before a move: have tenants that borrow granules which change hands use their homes alone.

        Raises Conflict if a work of one of them takes longer than `max_pause`. `remake` ends this.
        """
        for device, move in moves:
            changed = {each for name in move.movers for each in (*move.before.get(name, ()), *move.after.get(name, ()))}
            names = [
                name for name, wide in device.wide.items() if name not in move.movers and changed.intersection(wide.granules)
            ]
            for runtime in device.distinct(names) if names else ():
                await runtime.placements.narrow([name for name in names if device.runtimes.get(name) is runtime])

    def remake(self) -> None:
        """Granules have changed hands, or could not: plan again, in the background."""
        if self._loaded:
            self._start(self._carry_out())

    def narrowed(self) -> None:
        """Other things were seen of held models: plan again if some are to be held otherwise for that."""
        for device in self._devices:
            for name, fence in self._plan_fences(device, {}).items():
                before = device.fences.get(name, fence)
                if (fence.granules, fence.paced) != (before.granules, before.paced):
                    self.remake()
                    return

    async def carried_out(self) -> None:
        """Wait until the last plan is carried out, as far as it can be; executors on wide placements may come later."""
        while (work := self._work) and not work.done():
            await asyncio.wait({work})

    async def moved(self) -> dict[str, int]:
        """The bytes of memory that each tenant's cores have moved, where the kernel counts them."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.cores.moved)

    async def states(self) -> dict[str, Beside]:
        """What each tenant has beside its home, as its device side reports it; nothing of one that is being started again."""
        found: dict[str, Beside] = {}
        for device in self._devices if self._needed else ():
            for runtime in device.distinct():
                with suppress(RequestError):
                    found |= await runtime.placements.states()
        slows = {row: times for device in self._devices for row, times in device.slows.items()}
        cores = {name: plan.cores for device in self._devices for name, plan in device.fences.items() if plan.cores}
        moved = await self.moved() if cores else {}
        for tenant, each in found.items():
            if fence := each.fence:
                fence.cores, fence.moved = cores.get(tenant, ""), moved.get(tenant)  # Whatever its own process says of that.
                for model in fence.models:
                    model.slows = round(slows.get((tenant, model.model), 0.0), 2)
        return found

    def plan_ready(self, device: ControlledDevice) -> dict[str, list[Granules]]:
        """The granules on which each tenant of a device is to be ready for a move, by its ladder, without those that it has.

        They are those that it would get if it had so many. If others gave other ones, which can be where three or more share a
        device, the move is as without a ladder.
        """
        orders, sizes = device.orders, device.info.granules
        plans: dict[str, list[Granules]] = {}
        for name, partition in device.held.items():
            widths = self._tenants[name].rungs(device.info.unit, sizes)
            found = [rung(partition.granules, orders[name], width) for width in widths if width <= len(sizes)]
            plans[name] = [each for each in found if each != partition.granules]
        return plans

    @property
    def _needed(self) -> bool:
        return any(map(self._any, ("burst", "ladder", "fenced")))

    def _any(self, key: str) -> bool:
        """Whether any tenant has this key."""
        return any(getattr(tenant, key) for tenant in self._tenants.values())

    def _plan_fences(self, device: ControlledDevice, cores: Mapping[str, Held]) -> dict[str, Fence]:
        info = device.info
        theirs = device.own(cores)
        return plan_fences(self._tenants, device.homes, info.granules, info.unit, info.bandwidth, theirs, device.narrowing)

    async def _hold_cores(self) -> dict[str, Held]:
        """Hold the tenants' cores that are to be held, and no others; how they are held. All are counted."""
        shares = self._core_shares()
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self.cores.hold, shares)
        if self.cores.blocked:
            self._again = asyncio.get_running_loop().call_later(AGAIN, self.remake)
        return {name: held for name, held in found.items() if shares[name].most is not None}

    def _core_shares(self) -> dict[str, CoreShare]:
        """The cores of every tenant that has some, and the most that they draw, if they are to be held."""
        shares: dict[str, CoreShare] = {}
        for device in self._devices:
            if cores := cores_of(device.info.address):
                for name, home in device.homes.items():
                    shares[name] = CoreShare(tuple(cores[granule] for granule in home), None)
            shares |= core_shares(self._tenants, device.homes, device.info.granules, device.info.address)
        return shares

    def _plan_wide(self, device: ControlledDevice) -> dict[str, Wide]:
        homes = device.homes
        most = {name: self._most(device, name) for name in homes if self._tenants[name].burst is not None}
        return plan_wide(homes, most, {name: self._tenants[name].lend for name in homes})

    def _most(self, device: ControlledDevice, name: str) -> int:
        """The granules that a tenant may use at a time on this device. Where its burst does not fit: all that there are."""
        total = len(device.info.granules)
        return min(total, self._tenants[name].most(device.info.unit, device.info.granules)) if total else 0

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        for each in (self._work, self._again):
            if each:
                each.cancel()
        self._work = asyncio.create_task(work)
        self._work.add_done_callback(_log_failure)

    async def _begin(self, loaded: Callable[[], Awaitable[None]]) -> None:
        await loaded()
        self._loaded = True
        await self._carry_out()

    async def _carry_out(self) -> None:
        """Every device side is sent all that is planned, as the plan before may not have come to all of them."""
        async with self._changing:
            cores = await self._hold_cores()
            for device in self._devices:
                before, device.fences, device.wide = device.fences, self._plan_fences(device, cores), self._plan_wide(device)
                _log_notes(before, device.fences)
                if planned := bool(device.fences or device.wide):
                    self._placing.add(device.name)
                for runtime in device.distinct() if device.name in self._placing else ():
                    try:
                        await runtime.placements.plan(device.of(runtime, device.wide), device.of(runtime, device.fences))
                    except _FAILURES as error:
                        ladder_log.warning("nothing but their shares for tenants of device %s for now: %s", device.name, error)
                if not planned:
                    self._placing.discard(device.name)
        for device in self._devices if self._any("ladder") else ():
            plans = self.plan_ready(device)
            for runtime in device.distinct():
                await self._hold(runtime, device.of(runtime, plans), device.info.address)

    async def _hold(self, runtime: DeviceRuntime, plans: Mapping[str, Sequence[Granules]], address: str) -> None:
        """Have tenants of a device side ready for a move to these granules, and log what is new or has other models now."""
        try:
            found = await runtime.placements.hold(plans)
        except _FAILURES as error:
            ladder_log.warning("no ladders for now: %s", error)
            return
        for name in plans:
            before, now = self._logged.pop(name, []), found.get(name)
            if now:
                self._logged[name] = now
            for state in now if now and now != before else ():
                _log_ready(name, state, address)


def _log_notes(before: Mapping[str, Fence], now: Mapping[str, Fence]) -> None:
    """Log what is new; a share that holds nothing back while others work is a warning, as it was asked for."""
    for name, fence in now.items():
        if name not in before or (before[name].notes, before[name].cores) != (fence.notes, fence.cores):
            if fence.cores:
                fence_log.info("tenant %s is held to its memory_bandwidth at any time: %s", name, fence.cores)
            held = {"memory_bandwidth": fence.memory or fence.cores, "pcie": fence.pcie}
            for note in fence.notes:
                nothing = fence.neighbours and any(key in note and not how for key, how in held.items())
                fence_log.log(logging.WARNING if nothing else logging.INFO, "tenant %s: %s", name, note)


def _log_ready(tenant: str, state: ReadyShare, address: str) -> None:
    where, count = spelled(state.granules, address), state.models
    if not count:
        ladder_log.info("%s has no model ready on %s: a move there takes as long as without a ladder", tenant, where)
        return
    models = f"{count} model{'s' * (count != 1)}"
    ladder_log.info("%s can switch to %s: %s ready, %.1f MiB more", tenant, where, models, state.bytes / 2**20)


def _log_failure(work: "asyncio.Task[None]") -> None:
    if not work.cancelled() and (error := work.exception()):
        ladder_log.error("what tenants have beside their shares could not be changed: %s", error, exc_info=error)
