"""Uses another configuration while it is served: tenants that come and go, shares, models and keys, together or not at all.

1. What is added is made ready beside what is served: models of lists, and tenants, each on the granules that it will have.
2. Shares change as in any repartition. That is the last step which may be refused.
3. Every process is sent the configuration. Keys of tenants that go are unknown from now on, and those that come are served.
4. What is taken away is freed when its requests have ended.

Until 3 everything is undone after an error.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from types import MappingProxyType

from partitions import Move, PartitionError

from ..config.changes import loaded_again, removals
from ..config.schema import Config, ModelOptions
from ..errors import Conflict, RequestError
from ..tenants.frontend import ManagedFrontend
from .controlled_device import ControlledDevice
from .controller import Controller
from .device_runtime import Arrival, DeviceRuntime
from .tenant_plan import UNCHANGED, TenantPlan, concerns_shares, plan
from .together import together

log = logging.getLogger("greenlane.control")

Everywhere = Callable[[Config], Awaitable[None]]
"""Has every process use this configuration."""
_ONE_PROCESS = "this server is one process, which has the tenants that it started with: restart it"
_CANCELLED = 1.0
"""Seconds for requests of a tenant that goes to be answered once they are cancelled."""


async def reconfigure(controller: Controller, config: Config, everywhere: Everywhere) -> None:
    """Use this configuration, which differs in what may change while it is served; `everywhere` has all use it.

    One at a time. Raises Conflict, DoesNotFit or another error with the reasons if not all of it can be; then nothing has
    changed.
    """
    controller.reconfiguring, before = True, controller.repartitions
    try:
        await Reconfiguration(controller, config, everywhere).run()
        if controller.repartitions != before:
            async with controller.granules_change:
                await together(controller.look_held(device) for device in controller.devices)
    finally:
        controller.reconfiguring = False


class Reconfiguration:
    """One change of the configuration. Belongs to the controller's event loop; one at a time."""

    def __init__(self, controller: Controller, config: Config, everywhere: Everywhere) -> None:
        self._controller = controller
        self._host = controller.tenant_host
        self._before = controller.config
        self._config = config
        self._everywhere = everywhere
        self._options = loaded_again(self._before, config)
        self._lists = concerned(self._before, config, self._options)
        self._models = ModelChange((), {})

    async def run(self) -> None:
        """Make it. Raises RequestError or PartitionError; then nothing has changed."""
        async with AsyncExitStack() as locks, AsyncExitStack() as going, AsyncExitStack() as granules:
            shares = concerns_shares(self._before, self._config)
            if self._options or shares:  # Or a process begins meanwhile with the old ones.
                await locks.enter_async_context(self._holding(self._controller.device_changes))
            if shares:
                async with self._holding(self._controller.granules_change):
                    self._check_possible(self._plan())  # Before anything is loaded.
            gone = removals(self._before, self._config)
            hurried = any(self._controller.models_change(name).locked() for name in gone) and await self._hurry(gone)
            try:
                for name in (*self._lists, *gone):
                    lock = self._holding(self._controller.models_change(name), f"a change of {name}'s models")
                    await (going if name in gone else locks).enter_async_context(lock)
            finally:
                if hurried:  # They are held until they have gone.
                    self._controller.placements.remake()
            # Only now, as tenants have moved to other devices until here.
            self._models = ModelChange(self._controller.devices, self._lists, self._options, gone)
            async with AsyncExitStack() as undo:
                await self._models.prepare()
                undo.push_async_callback(self._models.discard)
                if shares:  # Others may have got other granules while models were loaded.
                    await granules.enter_async_context(self._holding(self._controller.granules_change))
                found = self._plan()
                arrivals = await self._prepare(found, undo)
                undo.push_async_callback(self._put_back_configuration)
                await self._everywhere(self._config)
                undo.pop_all()
            leaving = {name: self._leave(name, device) for name, device in found.go.items()}
            frontends = self._controller.use(self._config, found, arrivals)
            try:
                await going.aclose()  # Loads that wait are refused: their processes answer them before they end.
                if self._host:
                    await together(self._host.admit(name) for name in arrivals)
            finally:  # From here on nothing is undone, so that whatever fails, all else is done.
                endings = [self._end(name, frontends[name], *leaving[name]) for name in found.go]
                await together([self._models.use(), self._end_all(endings, granules)])

    def _holding(self, lock: asyncio.Lock, other: str = "another change") -> AbstractAsyncContextManager[None]:
        return self._controller.holding(lock, other)

    def _plan(self) -> TenantPlan:
        return plan(self._before, self._config, self._controller.devices)

    async def _hurry(self, gone: Collection[str]) -> bool:
        """Have loads of tenants that go pay no more for a share of PCIe, as all of this waits for them; whether some did."""
        hurried = False
        async with self._holding(self._controller.granules_change):
            for device in self._controller.devices:
                paying = {name for name in gone if name in device.fences and device.fences[name].pcie}
                fences = {name: each._replace(pcie=0) if name in paying else each for name, each in device.fences.items()}
                for runtime in device.distinct(paying) if paying else ():
                    with suppress(RequestError):  # It is being started again.
                        await runtime.placements.plan(device.of(runtime, device.wide), device.of(runtime, fences))
                hurried |= bool(paying)
        return hurried

    def _check_possible(self, found: TenantPlan) -> None:
        if (found.come or found.go) and self._host is None:
            names = ", ".join(f"tenants.{name}" for name in (*found.come, *found.go))
            raise Conflict(f"{UNCHANGED}: {names}: {_ONE_PROCESS}")

    async def _prepare(self, found: TenantPlan, undo: AsyncExitStack) -> dict[str, Arrival]:
        """Make tenants ready that come, and change the shares. What is to be done after an error is added to `undo`."""
        arrivals = await self._arrive(found, undo)
        if found.moves:
            with self._controller.recorded("operator", "reload", found.counts) as record:
                await self._controller.move(found.moves, record)
            undo.push_async_callback(self._move_back, found)
        return arrivals

    async def _arrive(self, found: TenantPlan, undo: AsyncExitStack) -> dict[str, Arrival]:
        """Make tenants ready that come, all at once. Raises Conflict with why some cannot be."""
        host = self._host
        if host is None:
            return {}
        work = [host.prepare(self._config, name, device.name, granules) for name, (device, granules) in found.come.items()]
        results = await asyncio.gather(*work, return_exceptions=True)
        arrivals = {name: each for name, each in zip(found.come, results, strict=True) if isinstance(each, Arrival)}
        for name in arrivals:
            undo.push_async_callback(host.discard, name)
        failed = {name: each for name, each in zip(found.come, results, strict=True) if isinstance(each, BaseException)}
        for error in failed.values():
            if not isinstance(error, RequestError | PartitionError):
                raise error
        if failed:
            lines = "\n".join(f"tenants.{name}: {error}" for name, error in failed.items())
            raise Conflict(f"{UNCHANGED}, as not every tenant that is added can be served:\n{lines}")
        return arrivals

    async def _put_back_configuration(self) -> None:
        try:
            await self._everywhere(self._before)
        except (OSError, RequestError) as error:
            log.error("not every process may have the configuration of before: %s", error)

    async def _move_back(self, found: TenantPlan) -> None:
        """Give tenants the shares that they had."""
        moves = [(device, Move(move.after, move.before)) for device, move in found.moves]
        counts = {name: len(move.before[name]) for _, move in found.moves for name in move.movers}
        try:
            with self._controller.recorded("operator", "reload, undone", counts) as record:
                await self._controller.move(moves, record)
            self._controller.moves.given.difference_update(counts)
        except (RequestError, PartitionError) as error:
            log.error("shares that a reload changed are not as before: %s", error)

    def _leave(self, name: str, device: ControlledDevice) -> tuple[ControlledDevice, DeviceRuntime]:
        assert self._host
        self._host.leave(name)
        return device, device.runtimes[name]

    async def _end_all(self, endings: Sequence[Awaitable[None]], granules: AsyncExitStack) -> None:
        """Then `granules` may change hands: that does not wait for requests of models that are replaced."""
        async with granules:
            await together(endings)

    async def _end(self, name: str, frontend: ManagedFrontend, device: ControlledDevice, runtime: DeviceRuntime) -> None:
        """Let a tenant that goes answer what it has accepted, for half of `drain_timeout`, and free what it has."""
        assert self._host
        grace = self._config.server.drain_timeout / 2  # As for a server that ends.
        try:
            async with asyncio.timeout(grace):
                await frontend.drained()
        except TimeoutError:
            log.warning("tenant %s goes: its requests that have not ended after %g s are answered 503", name, grace)
            frontend.suspend(f"tenant {name} was taken away, and this had not ended after {grace:g} s (server.drain_timeout)")
            try:
                async with asyncio.timeout(_CANCELLED):
                    await frontend.drained()
            except TimeoutError:
                log.error("tenant %s: some inferences cannot be cancelled; its processes are ended", name)
        await self._controller.leaving(device, runtime)
        await self._host.end(name)
        log.info("tenant %s has gone", name)


Lists = Mapping[str, Sequence[str]]
"""The models that a tenant may call, as the configuration's `models`, by tenant."""


def concerned(old: Config, new: Config, options: Mapping[str, ModelOptions]) -> dict[str, Sequence[str]]:
    """The lists of tenants that stay, where they changed or the tenant may call one of these models, before or after."""
    return {
        name: tenant.models
        for name, tenant in new.tenants.items()
        if (before := old.tenants.get(name))
        and (before.models != tenant.models or any(before.may_call(each) or tenant.may_call(each) for each in options))
    }


class ModelChange:
    """One change to these lists, and of the options of models that are to be loaded again: `prepare`, then `use` or `discard`.

    `lists` has all tenants that may call one of these, and nothing else changes their models meanwhile. Device sides that only
    have tenants that are `gone` are not asked.
    """

    def __init__(
        self,
        devices: Sequence[ControlledDevice],
        lists: Lists,
        options: Mapping[str, ModelOptions] = MappingProxyType({}),
        gone: Collection[str] = (),
    ) -> None:
        self._options = options
        self._parts: list[tuple[str, DeviceRuntime, Lists]] = []
        for device in devices:
            for runtime in device.distinct():
                own = device.of(runtime, lists)
                others = any(each is runtime and name not in gone for name, each in device.runtimes.items())
                if own or (options and (others or runtime is device.process)):
                    self._parts.append((device.name, runtime, own))

    async def prepare(self) -> None:
        """Have every device load what is added, and what is to be loaded again; nothing of it is served yet.

        Raises Conflict with everything that cannot be loaded; nothing is left of it then.
        """
        try:
            found = await asyncio.gather(*(self._prepare(*part) for part in self._parts))
        except BaseException:
            await asyncio.shield(self.discard())
            raise
        if problems := dict.fromkeys(problem for each in found for problem in each):
            await self.discard()
            lines, what = "\n".join(problems), "added or changed" if self._options else "added"
            raise Conflict(f"nothing has changed, as not every model that is {what} can be loaded:\n{lines}")

    async def _prepare(self, device: str, runtime: DeviceRuntime, own: Lists) -> list[str]:
        try:
            return await runtime.models.prepare(own, self._options)
        except RequestError as error:  # Such as one whose process has ended.
            return [f"tenants.{name}.models: {error}" for name in own] or [f"device {device}: {error}"]

    async def use(self) -> None:
        """Serve what was added, and take the rest away; returns when no request for that is left."""
        await asyncio.gather(*(runtime.models.use(own, self._options) for _, runtime, own in self._parts))

    async def discard(self) -> None:
        """Free what was prepared, on every device."""
        found = await asyncio.gather(*(runtime.models.discard() for _, runtime, _ in self._parts), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                log.error("models that were not added are not all freed: %s", error)
