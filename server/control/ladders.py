"""Decides on which granules each tenant with a ladder should have its models ready, after each change of who has which."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from engines import EngineError
from partitions import PartitionError
from partitions.plan import Granules, rung

from ..config.tenant import TenantConfig
from ..errors import RequestError
from .controlled_device import ControlledDevice
from .descriptions import RungState

log = logging.getLogger("greenlane.ladder")


class LadderPlans:
    """Belongs to the controller's event loop. Without a ladder it does nothing.

    A rung's granules are those that the tenant would get if it had so many. If others gave other ones, which can be where
    three or more share a device, the move is as without a ladder.
    """

    def __init__(self, tenants: Mapping[str, TenantConfig], devices: Sequence[ControlledDevice]) -> None:
        self._tenants = tenants
        self._devices = devices
        self._any = any(tenant.ladder for tenant in tenants.values())
        self.states: dict[str, list[RungState]] = {}
        """What was ready when the last plan was carried out, by tenant."""
        self._planned: set[str] = set()
        """The names of devices where tenants have rungs by the last plan."""
        self._work: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<LadderPlans {'; '.join(str(self.plan(device)) for device in self._devices) if self._any else 'none'}>"

    def begin(self, loaded: Callable[[], Awaitable[None]]) -> None:
        """Plan for the first time once all models are loaded."""
        if self._any:
            self._work = asyncio.create_task(self._hold(loaded))

    def remake(self) -> None:
        """Granules have changed hands, or could not: plan again once an earlier plan was sent."""
        if self._any and (before := self._work):
            self._work = asyncio.create_task(self._hold(partial(asyncio.wait, {before})))

    def reconfigure(self, tenants: Mapping[str, TenantConfig]) -> None:
        """Plan for these tenants from now on; some may have come or gone."""
        self._tenants = tenants
        self.states = {name: each for name, each in self.states.items() if name in tenants}
        if any(tenant.ladder for tenant in tenants.values()) and self._work is None:
            self._any = True
            self._work = asyncio.create_task(self._hold(partial(asyncio.sleep, 0)))
        else:
            self.remake()

    def close(self) -> None:
        """Change nothing any more."""
        self._any = False
        if self._work:
            self._work.cancel()

    def plan(self, device: ControlledDevice) -> dict[str, list[Granules]]:
        """The rungs of each tenant of a device, without the granules that it has."""
        orders, sizes = device.orders, device.info.granules
        plans: dict[str, list[Granules]] = {}
        for name, partition in device.held.items():
            widths = self._tenants[name].rungs(device.info.unit, sizes)
            found = [rung(partition.granules, orders[name], width) for width in widths if width <= len(sizes)]
            plans[name] = [each for each in found if each != partition.granules]
        return plans

    def _show(self, states: list[RungState]) -> None:
        """Log rungs that are new or have other models now."""
        for tenant in {state.tenant for state in states}:
            found = [state for state in states if state.tenant == tenant]
            before, self.states[tenant] = self.states.get(tenant, []), found
            for state in found if found != before else ():
                count, granules = state.models, list(state.granules)
                if not count:
                    log.info(
                        "%s has no model ready on granules %s: a move there takes as long as without a ladder", tenant, granules
                    )
                    continue
                models = f"{count} model{'s' * (count != 1)}"
                log.info("%s can switch to granules %s: %s ready, %.1f MB more", tenant, granules, models, state.nbytes / 1e6)

    async def _hold(self, first: Callable[[], Awaitable[object]]) -> None:
        await first()
        for device in self._devices:
            plans, before = self.plan(device) if device.held else {}, device.name in self._planned
            self._planned = {*self._planned, device.name} if any(plans.values()) else self._planned - {device.name}
            for runtime in device.distinct() if before or any(plans.values()) else ():
                mine = device.of(runtime, plans)
                for name in [name for name, granules in mine.items() if not granules]:
                    self.states.pop(name, None)
                try:
                    self._show(await runtime.widths.hold(mine))
                except (RequestError, EngineError, PartitionError) as error:  # It gets the plan when it is started again.
                    log.warning("no ladders for now: %s", error)
