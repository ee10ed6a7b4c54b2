"""Runs the autopilot of each device: measures every few seconds, and moves granules as an operator would."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from partitions import PartitionError

from ..control.controlled_device import ControlledDevice
from ..control.controller import Controller
from ..control.together import completed
from ..errors import RequestError
from .autopilot import Autopilot, Goal, Pace, Step
from .need import History, Need, counted, held

log = logging.getLogger("greenlane.autopilot")

Mode = Literal["off", "dry-run", "on"]
"""`dry-run`: it says what it would move, and moves nothing."""
MODES: tuple[Mode, ...] = ("off", "dry-run", "on")


class Pilot:
    """Measures every tenant's need, and carries out what each device's autopilot decides. Belongs to the event loop.

    Nothing is moved while a device starts, restarts or drains, while granules are being moved, and for `Pace.after_operator`
    after an operator moved some. What an operator gave a tenant is its own share from then on.
    """

    def __init__(
        self, controller: Controller, mode: Mode, pace: Pace | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.mode: Mode = mode
        self.pace = pace or Pace()
        self.needs: dict[str, Need] = {}
        """What each tenant needed in the last window; none while it is off, and for a window after each move."""
        self._controller = controller
        self._clock = clock
        self._history = History(self.pace.window)
        self._autopilots: dict[str, Autopilot] = {}
        self._held: dict[str, dict[str, int]] = {}
        self._proposed: dict[tuple[str | None, str], float] = {}
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Measure every few seconds from now on, unless it is off; also after `set_mode`."""
        if self.mode != "off" and (self._running is None or self._running.done()):
            self._running = asyncio.create_task(self._run())

    def close(self) -> None:
        """Move nothing more; a move that has begun is completed by the controller."""
        if self._running:
            self._running.cancel()

    def set_mode(self, mode: Mode) -> None:
        """Switch it. One that is switched on measures for a window before it moves anything."""
        if mode != self.mode:
            log.info("the autopilot is %s now, it was %s", mode, self.mode)
            self.mode = mode
            self._forget()
            self.needs = {}
            for autopilot in self._autopilots.values():
                autopilot.notes = []
            self.close()
            self._running = None
            self.start()

    @property
    def paused_for(self) -> float:
        """The seconds for which nothing is moved because an operator did."""
        at = self._controller.moves.by_operator
        return 0.0 if at is None else max(0.0, at + self.pace.after_operator - self._clock())

    def own(self, tenant: str) -> int | None:
        """The granules that are a tenant's own, by the configuration or by an operator; None before the first measurement."""
        return next((each.own[tenant] for each in self._autopilots.values() if tenant in each.own), None)

    @property
    def notes(self) -> list[str]:
        """Why tenants that miss their targets get nothing, as of the last measurement."""
        return [note for autopilot in self._autopilots.values() for note in autopilot.notes]

    async def tick(self) -> None:
        """Measure once, and make at most one move on each device."""
        beside = await self._controller.placements.states()
        now = self._clock()  # Only now, as a device side may answer late.
        for tenant, report in await self._controller.reports():
            if report.age:  # Its process does not answer.
                self._history.forget(tenant.name)
            else:
                found = beside.get(tenant.name)
                self._history.add(tenant.name, counted(report, now, held(tenant, found.fence if found else None)))
        for device in self._controller.devices:
            await self._fly(device, now)
        self.needs = self._history.needs()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.pace.period)
            try:
                await self.tick()
            except Exception:  # It goes on: a server without its autopilot would keep shares that were for another load.
                log.exception("the autopilot failed; it goes on")

    async def _fly(self, device: ControlledDevice, now: float) -> None:
        """Decide for one device, and carry that out."""
        held = device.counts
        if self._controller.device_state(device) not in ("serving", "incomplete") or self._controller.moving:
            self._forget(held)
            return
        autopilot = self._autopilot(device, held)
        needs = self._history.needs()
        own = {name: each for name, each in needs.items() if name in held}
        step = autopilot.decide(now, len(device.info.granules), held, own)
        if step is None or self.paused_for:
            return
        if self.mode == "dry-run":
            self._propose(step, held, now)
        else:
            await self._move(autopilot, step, own, now)

    def _autopilot(self, device: ControlledDevice, held: dict[str, int]) -> Autopilot:
        """The device's autopilot, with the goals of now. What tenants have is their own share if one has just come, or been
        given its share by an operator.
        """
        found, before = self._autopilots.get(device.name), self._held.get(device.name)
        given = self._controller.moves.given.intersection(held)
        self._controller.moves.given -= given
        goals = {name: goal for name in held if (goal := self.goal(name, device))}
        if found is None or before is None or before.keys() != held.keys() or given:
            unit = device.info.unit if set(device.info.granules) == {1} else "granule"
            found = self._autopilots[device.name] = Autopilot(goals, held, unit, self.pace)
        found.goals = goals  # A reload may have changed them.
        if before is not None and before != held:
            self._forget(held)
        self._held[device.name] = held
        return found

    def goal(self, name: str, device: ControlledDevice) -> Goal | None:
        """What the tenant is to keep; None if the configuration says nothing, so that nothing is taken from or given to it."""
        tenant = self._controller.tenants[name]
        if tenant.target_p99 is None and tenant.min_granules is None:
            return None
        unit, sizes = device.info.unit, device.info.granules
        most = None if tenant.burst is None else tenant.most(unit, sizes)
        return Goal(tenant.target_p99, tenant.min_granules or 1, tenant.rungs(unit, sizes), most)

    def _propose(self, step: Step, held: Mapping[str, int], now: float) -> None:
        """Say what would be moved, from the same tenant to the same once in a while."""
        if now - self._proposed.get((step.giver, step.receiver), -math.inf) > self.pace.bar:
            self._proposed[step.giver, step.receiver] = now
            self._controller.moves.begin("autopilot", step.reason, held, step.counts).outcome = "proposed"
            log.info("dry run: the autopilot would move %s", step.reason)

    async def _move(self, autopilot: Autopilot, step: Step, needs: Mapping[str, Need], now: float) -> None:
        try:
            # Also when the pilot is closed.
            await completed(self._controller.repartition(step.counts, "autopilot", step.reason))
        except (RequestError, PartitionError) as error:
            autopilot.refused(now, step)
            log.warning("the autopilot could not move %s: %s", step.reason, error)
        else:
            autopilot.moved(now, step, needs)

    def _forget(self, tenants: "Sequence[str] | Mapping[str, int] | None" = None) -> None:
        """Measure these tenants, or all, from the beginning."""
        for name in self._controller.tenants if tenants is None else tenants:
            self._history.forget(name)
