"""A tenant's HTTP process as the supervisor sees it; see `server.tenants.frontend`.

What the HTTP process was sent is kept, to be sent again to its replacement when it dies.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from mmap import PAGESIZE
from typing import Any, NamedTuple

from ...config.tenant import TenantConfig
from ...errors import Conflict, Unavailable
from ...link import ring as links
from ...link.messages import ModelKey
from ...link.ring import Descriptors
from ...tenants.catalog import IndexEntry, ModelVersion
from ...tenants.frontend import DeviceSide, HttpSide, Report, State, not_ended
from ...tenants.service import slots
from ..channels.calls import proxy, serve
from ..channels.descriptors import DescriptorSender
from ..channels.http_protocols import FromHelper, FromLead, ToHttpProcess, ToTenant, Wanted
from ..channels.rpc import Channel, Handlers, Malformed
from .http_processes import HttpProcesses

log = logging.getLogger("greenlane.processes")


class Publication(NamedTuple):
    """The versions of a model that are served, and problems of others."""

    name: str
    served: list[ModelVersion]
    problems: list[IndexEntry]


class RemoteFrontend(HttpSide):
    """Belongs to the event loop. `connect` gives it the process at its link's other end, `renew` or `relink` a new link.

    If the tenant has several HTTP processes that one is the lead; `add_helper` gives it each of the others.
    """

    def __init__(self, config: TenantConfig, descriptors: Descriptors) -> None:
        self.descriptors = descriptors
        self.allows: Callable[[str], bool] | None = None
        """Set while a device process that replaces another loads its models: which of them the tenant may call now."""
        self._config = config
        self._device: DeviceSide | None = None
        self._processes = HttpProcesses()
        self._models: dict[str, Publication] = {}
        """What was published last of each model; nothing while it is loaded for the first time."""
        self._lost = set[str]()
        """The models whose device side has ended: each is loading until it is published again."""
        self._paged = set[ModelKey]()
        self._ended = self._suspended = ""
        self._wanted = Wanted()
        self._catching_up = set[Channel]()
        """Those to processes that do not have all models yet: each is starting until it has."""
        self._cores: frozenset[int] | None = None
        self._assigned: frozenset[int] | None = None
        self._want_cores()

    def handlers(self) -> Handlers:
        """The handlers of what the process may call."""
        return {**serve(FromLead)(lambda: self), **self.handlers_of_helpers()}

    def handlers_of_helpers(self) -> Handlers:
        """The same for a helper."""
        return serve(FromHelper)(lambda: self)

    async def connect(self, channel: Channel, descriptors: DescriptorSender) -> None:
        """Use this process from now on, and send it what its predecessors were sent."""
        self._processes.connect(channel, descriptors)
        await self._catch_up(channel)

    async def add_helper(self, number: int, channel: Channel) -> None:
        """Use this process, the helper of this number, too, and send it what the lead was sent."""
        self._processes.add_helper(number, channel)
        await self._catch_up(channel)

    def remove_helper(self, number: int) -> None:
        """It has ended. What it counted stays in the totals."""
        self._processes.remove_helper(number)

    async def _catch_up(self, channel: Channel) -> None:
        process = proxy(ToHttpProcess, channel)
        self._catching_up.add(channel)
        process.follow(self._wanted_of(channel))
        paged = set(self._paged)
        published = list(self._repeat(process))  # All of it is sent before anything else can be.
        try:
            with suppress(Unavailable):
                await asyncio.gather(*published)
        finally:
            self._catching_up.discard(channel)
        if channel in self._processes.channels:
            for model in paged - self._paged:  # It may have shown it as paged out after it was notified.
                process.page_in(model)
            process.follow(self._wanted_of(channel))

    def _repeat(self, process: ToHttpProcess) -> Iterator[Awaitable[Any]]:
        for each in self._models.values():
            if each.name not in self._lost and (each.served or each.problems):
                yield process.publish(*each)
            else:
                process.announce(each.name)
        for model in self._paged:
            yield process.page_out(model)

    def _want(self, **changes: Any) -> None:
        """Have all processes follow what has changed."""
        self._wanted = self._wanted._replace(**changes)
        for channel in self._processes.channels:
            proxy(ToHttpProcess, channel).follow(self._wanted_of(channel))

    def _wanted_of(self, channel: Channel) -> Wanted:
        """What this process is to be."""
        return self._wanted._replace(state="starting", listed=False) if channel in self._catching_up else self._wanted

    def renew(self) -> Callable[[], None]:
        """Make a new link to the same memory. Returns what frees the old link, to be called once the worker has left it.

        Call it when the process at the other end has ended. Start the next one only when the worker has left the old link:
        otherwise both would write to the same blocks.
        """
        self._processes.forget()
        return self._use(links.renew(self.descriptors)).close

    def _use(self, new: Descriptors) -> Descriptors:
        """Change links; returns the old one."""
        old, self.descriptors = self.descriptors, new
        return old

    @property
    def refusing(self) -> str:
        """Why no requests are taken now: the device side has ended, or has suspended the tenant; "" if they are taken."""
        return self._ended or self._suspended

    def suspend(self, reason: str) -> None:
        self._suspended = reason
        if not self._ended:
            self._want(suspended=reason)

    def serve(self) -> None:
        """Another process has the device side now: each model is served from the moment at which it is published."""
        self._ended = ""
        self._want(suspended=self._suspended)

    def fail_in_flight(self, reason: str, queued: bool = True) -> None:
        """As `ManagedFrontend.fail_in_flight`; with `queued` until `serve`, and no model is served any more that is not
        published again.
        """
        for process in self._processes.all:
            process.fail_in_flight(reason, queued)
        if queued:
            self._ended, self._suspended = reason, ""
            self._want(suspended=reason)
            self._lost.update(each.name for each in self._models.values() if each.served)
            self._paged.clear()

    async def relink(self, limit: float = math.inf) -> Callable[[], None]:
        """See `ManagedFrontend.relink`. It waits up to `limit` for the process if there is none now, and for its answer longer.

        If the process ends meanwhile, the new link is as one by `renew`, and so is what is returned.
        """
        return await asyncio.shield(self._relink(limit))

    async def _relink(self, limit: float) -> Callable[[], None]:
        await self._wait_for_process(limit)
        channel, unused = self._processes.lead, links.renew(self.descriptors)
        try:
            if not await self._send_link(unused, limit):
                raise Conflict(not_ended(self._config.name, limit))
            if channel is self._processes.lead:  # Else `renew` was called, and its link is the one in use.
                unused = self._use(unused)
            return unused.close
        except BaseException:
            unused.close()
            raise

    async def _wait_for_process(self, limit: float) -> None:
        """Raises Conflict after so long: the caller may hold a lock that the process waits for before it starts."""
        try:
            async with asyncio.timeout(None if math.isinf(limit) else limit):
                await self._processes.connected.wait()
        except TimeoutError:
            why = f"its HTTP process has been starting for more than {limit:g} s; its link was not replaced"
            raise Conflict(f"tenant {self._config.name}: {why}. Try again when it runs") from None

    async def _send_link(self, new: Descriptors, limit: float) -> bool:
        """Whether the process uses this link now, or has ended. Raises Failed if it cannot."""
        channel, sender = self._processes.lead, self._processes.sender
        assert channel
        assert sender
        try:
            return await proxy(ToTenant, channel).relink(sender.send_link(new), limit)
        except Unavailable:
            await channel.closed.wait()  # One that takes no descriptors hangs, and is killed soon.
            return True

    def change_device(self, paged: Collection[ModelKey], suspended: str) -> None:
        """Another device has the tenant from now on, has suspended it for this reason, if there is one, and has these versions
        paged out of those that are published next.
        """
        self.suspend(suspended)
        self._paged.update(paged)

    def lost(self) -> Collection[str]:
        """The models that were served when the device side ended, and have not been published since."""
        return self._lost

    def served(self) -> list[ModelVersion]:
        """The models that were published last."""
        return [version for each in self._models.values() for version in each.served]

    def last_uses_known(self) -> Mapping[str, int]:
        """When each model was last used, as far as the supervisor knows without asking, on any clock; 0 for never."""
        return self._processes.last_uses()

    async def problems(self) -> list[IndexEntry]:
        """The models that cannot be served, with the reasons, as the process has them. Raises Unavailable if it ends."""
        assert self._processes.lead
        found = await proxy(ToTenant, self._processes.lead).report()
        return [each for each in found.index if each.state == "UNAVAILABLE"]

    def open(self, device: DeviceSide) -> None:
        self._device = device

    def set_state(self, state: State, progress: str = "") -> None:
        """Send the process the server's state, and how far its start is."""
        self._want(state=state, progress=progress)

    def announce(self, name: str) -> None:
        if name not in self._models or not self._models[name].served:
            self._models[name] = Publication(name, [], [])
        for process in self._processes.all:
            process.announce(name)

    def listed(self) -> None:
        self._want(listed=True)

    async def agree(self, name: str, served: Sequence[ModelVersion]) -> str:
        """A process that ends meanwhile does not refuse: the next one runs the functions when it is sent the models."""
        if not any(each.functions for each in served):
            return ""
        answers = await self._processes.each(lambda process: process.agree(name, served))
        why = next(filter(None, answers), "")
        if why:
            self.withdraw(name)
        return why

    def withdraw(self, name: str) -> None:
        for process in self._processes.all:
            process.withdraw(name)

    async def publish(self, name: str, served: list[ModelVersion], problems: list[IndexEntry]) -> bool:
        """As `HttpSide.publish`. The process is sent a list of models that was changed once all of these are loaded: until then
        what the tenant may not call is left out.
        """
        if (served or problems) and self.allows and not self.allows(name):
            return True
        before, now = self._models.pop(name, None), Publication(name, served, problems)
        if before:
            self._paged -= {each.key for each in before.served} - {each.key for each in served}
        if served or problems:
            self._models[name] = now
        self._lost.discard(name)
        answers = await self._processes.each(lambda process: process.publish(*now))
        for each in served:
            if each.key in self._paged:  # It came so from another device, and has not been paged in since.
                await self._show_paged_out(each.key)
        return bool(answers and answers[0])

    async def last_uses(self) -> Mapping[ModelKey, int]:
        latest: dict[str, int] = {}
        for found in await self._processes.each(lambda process: process.last_uses()):
            for model, used in (found or {}).items():
                latest[model] = max(used, latest.get(model, 0))
        return latest

    async def page_out(self, model: ModelKey) -> bool:
        """Without a process there is no request. What a helper has not sent to its lead yet comes after it."""
        self._paged.add(model)  # At once: a process may come before the answer, and the device may end.
        if not (shown := await self._show_paged_out(model)):
            self.page_in(model)  # Helpers show it as paged out.
        return shown

    async def _show_paged_out(self, model: ModelKey) -> bool:
        """Whether the lead does, which a process may do after it was notified of what happened meanwhile."""
        answers = await self._processes.each(lambda process: process.page_out(model))
        if model not in self._paged:
            self.page_in(model)
        return False not in answers[:1]

    def page_in(self, model: ModelKey) -> None:
        self._paged.discard(model)
        for process in self._processes.all:
            process.page_in(model)

    def set_cores(self, cores: frozenset[int] | None) -> None:
        self._cores = cores
        self._want_cores()

    def assign_cores(self, cores: frozenset[int]) -> None:
        """Restrict the process to these of the host's cores, unless the configuration or the partition names others."""
        self._assigned = cores
        self._want_cores()

    async def report(self) -> Report:
        return await self._processes.report()

    def refuse(self, reason: str) -> None:
        self._want(refused=reason)

    def distrust(self, reason: str) -> None:
        """Close the channel: the supervisor replaces the process then, and gives its replacement a new link."""
        log.error("malformed message in the link of tenant %s; replacing its HTTP process: %s", self._config.name, reason)
        if self._processes.lead:
            self._processes.lead.distrust()

    async def drained(self) -> None:
        await self._processes.each(lambda process: process.drained())

    def close(self) -> None:
        """Free the link, and the tenant's memory once no process uses it."""
        self.descriptors.close()

    def _want_cores(self) -> None:
        """Restrict the process to the cores in the configuration, or else of its partition, or else those assigned."""
        cores: Iterable[int] | None = self._config.front_cores or self._cores or self._assigned
        self._want(cores=frozenset(cores) if cores else None)

    def cancel(self, slot: int, serial: int) -> None:
        if slot >= self.descriptors.slots:
            raise Malformed(f"slot {slot} of {self.descriptors.slots}")
        if self._device:
            self._device.cancel(self._config.name, slot, serial)


def open_remote(config: TenantConfig, linked: bool = True) -> RemoteFrontend:
    """A frontend that has a link but no process yet. Its `close` frees the link.

    Not `linked`: the tenant's own process has its device side and their link, so that this one is never used, and tiny.
    """
    return RemoteFrontend(config, links.create(slots(config), config.memory if linked else PAGESIZE))
