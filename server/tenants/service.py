"""What the HTTP side knows: the tenants, the models of those served in this process, and the server's state."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NoReturn

from ..config.schema import Config
from ..config.tables import dotted
from ..config.tenant import TenantConfig
from ..errors import Conflict, Misdirected
from ..link import ring as links
from ..link.messages import ModelKey
from ..link.occupancy import LEAD, Occupancy, SharedBlocks
from ..link.ring import Descriptors, Link
from ..link.spread import Spread
from ..protocol.request import Limits
from ..scheduling.helper_scheduler import HelperScheduler
from ..scheduling.lane import Lane
from ..scheduling.pending import Canceller
from ..scheduling.scheduler import Scheduler
from ..scheduling.spread_scheduler import SpreadScheduler
from ..text.tokenizer import TokenizerFailed
from .auth import Tenancy
from .catalog import Catalog, IndexEntry, ServedModel
from .frontend import DeviceSide, ModelReport, Report, State, not_ended
from .model_changes import ModelChanges
from .running_functions import FunctionsFailed, close_all, open_functions
from .running_text import RunningText, open_text
from .tracing import Tracing
from .unread import UnreadAnswers
from .uploads import Uploads

log = logging.getLogger("greenlane")

FINISH_SECONDS = 30.0
"""How long answers in parts go on after their model was unloaded or replaced."""
HORIZON = 200_000
"""Nanoseconds of short works that may be launched ahead: a few times the round trip to the worker."""
TENANTLESS_MEMORY = 4 << 20
"""Bytes of request bodies without a tenant that may arrive at a time: of administrators, up to 1 MiB each."""
SPARE_SLOTS = 256
"""Slots beyond those of a full queue: for requests in flight, being decoded, and being encoded."""


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant that is served in this process: configuration, models, queue, request bodies, and its model changes."""

    config: TenantConfig
    catalog: Catalog
    lane: Lane
    uploads: Uploads
    unread: UnreadAnswers
    changes: ModelChanges = field(default_factory=ModelChanges)
    execution_limit: tuple[float, str] = (0.0, "")
    """As `Config.execution_limit`; functions of models have the same."""
    tracing: Tracing = field(default_factory=Tracing)

    @property
    def name(self) -> str:
        return self.config.name

    def refuse(self, reason: str) -> None:
        """Refuse new requests, and those whose bodies are still arriving."""
        self.lane.refusing = reason
        self.uploads.refuse(reason)

    def suspend(self, reason: str) -> None:
        """As `refuse`, but until it is called with "", and also fail requests that are queued or run."""
        self.lane.suspend(reason)
        if reason:
            self.uploads.refuse(reason)

    def fail_in_flight(self, reason: str, queued: bool) -> None:
        """As `Lane.fail_in_flight`; with `queued` also refuse requests whose bodies are still arriving."""
        self.lane.fail_in_flight(reason, queued)
        if queued:
            self.uploads.refuse(reason)


class Service:
    """Belongs to the event loop."""

    def __init__(self, config: Config, tenants: Iterable[Tenant]) -> None:
        self.config = config
        self.limits = Limits(
            config.server.max_json_tensor,
            config.server.max_body,
            config.server.nonfinite_json,
            config.server.max_string_elements,
        )
        self.tenancy = Tenancy(config.tenants.values(), config.server.default_tenant)
        self.tenants = {tenant.name: tenant for tenant in tenants}
        for name, tenant in self.tenants.items():
            tenant.catalog.weigh(config.version_weights(name))
        self.uploads = Uploads(TENANTLESS_MEMORY)
        self.unread = UnreadAnswers(TENANTLESS_MEMORY)
        for name, tenant in self.tenants.items():
            tenant.execution_limit = config.execution_limit(name)
        for unread in (self.unread, *(tenant.unread for tenant in self.tenants.values())):
            unread.seconds = config.server.write_timeout
        self.state: State = "starting"
        self.totals: Callable[[], Awaitable[Report]] | None = None
        """Returns the report of all processes of the tenant, if it has several."""
        self._max_silence = config.server.watchdog / 4 or float("inf")
        self._heartbeat_at = float("inf")

    def __repr__(self) -> str:
        return f"<Service {self.state}, of {', '.join(self.tenants) or 'no tenant'}>"

    @property
    def unready(self) -> str | None:
        """Why the server is not ready; None if it is: loading has finished, it is not stopping, and the device process, if
        it is another one, has sent a heartbeat recently.
        """
        if self.state == "incomplete":
            which = "POST /v2/repository/index says which of a tenant's, the log which of all"
            return f"not every model could be loaded, and server.strict_readiness asks for all of them; {which}"
        if self.state != "serving":
            return f"the server is {self.state}"
        suspended = [tenant.lane.suspended for tenant in self.tenants.values()]
        if suspended and all(suspended):
            return suspended[0]
        silence = time.monotonic() - self._heartbeat_at
        return None if silence <= self._max_silence else f"the device's process has been silent for {silence:.0f} s"

    @property
    def unanswered(self) -> int:
        """How many requests, of all tenants in this process, are queued or in flight."""
        lanes = [tenant.lane.statistics() for tenant in self.tenants.values()]
        return sum(lane.waiting + lane.in_flight for lane in lanes)

    async def statistics(self, served: Iterable[ServedModel]) -> list[dict[str, object]]:
        """For each of these models an entry of `model_stats` in Triton's statistics extension, of all processes."""
        found = {}
        if self.totals:
            found = {(each.name, each.version): each.statistics for each in (await self.totals()).served}
        counted = [(each, found.get((each.name, each.version), each.statistics)) for each in served]
        return [{"name": each.name, "version": each.version, **statistics.as_json()} for each, statistics in counted]

    def reconfigure(self, config: Config) -> None:
        """Use this configuration from now on: its keys, rights and hosts. A tenant that it has no more keeps its own."""
        self.config = config
        self.tenancy = Tenancy(config.tenants.values(), config.server.default_tenant)
        for name, tenant in self.tenants.items():
            if name in config.tenants:
                tenant.config = config.tenants[name]
                tenant.catalog.weigh(config.version_weights(name))

    def heartbeat(self) -> None:
        """The device process is alive; called repeatedly if it is another process."""
        self._heartbeat_at = time.monotonic()

    def set_state(self, state: State) -> None:
        """Set the server's state."""
        self.state = state

    def tenant(self, authorization: str | None, name: str | None) -> Tenant:
        """The tenant of a request with these headers. Raises Unauthorized, or Misdirected if another process serves it."""
        tenant = self.tenancy.identify(authorization, name)
        return self.tenants.get(tenant.name) or self.misdirected(tenant)

    def misdirected(self, tenant: TenantConfig) -> NoReturn:
        """Refuse a request of a tenant that another process serves. Raises Misdirected."""
        owner = " and ".join(f"tenant {name!r}" for name in self.tenants) or "no tenant"
        where = "to the server's common port" + (f", or to {tenant.port}, its own," if tenant.port else "")
        text = f"this connection belongs to {owner}; send requests of {tenant.name!r} {where} on another connection"
        raise Misdirected(text)


def open_tenant(
    config: TenantConfig, link: Link, control: Canceller, occupancy: Occupancy | None = None, spread: Spread | None = None
) -> Tenant:
    """A tenant without models yet. `occupancy` is set if it has several HTTP processes, and says which this is.

    `spread` is set if it is on several devices, and `link` is its.
    """
    queue, memory = (dotted(("tenants", config.name, key)) for key in ("queue", "memory"))
    blocks = SharedBlocks(config.memory, memory, occupancy) if occupancy else None
    helper = occupancy is not None and occupancy.number != LEAD
    scheduler: Scheduler
    if occupancy and helper:
        scheduler = HelperScheduler(slots(config), config.queue, queue, occupancy)
    elif spread:
        scheduler = SpreadScheduler(config.queue, config.in_flight, HORIZON, queue, len(spread.members))
        spread.on_serving = scheduler.set_devices
    else:
        scheduler = Scheduler(config.queue, config.in_flight, HORIZON, queue)
    lane = Lane(config.name, scheduler, link, control, blocks, helper)
    uploads = Uploads(config.memory, lambda text: lane.reject(f"{text} ({memory})"), occupancy=occupancy)
    unread = UnreadAnswers(config.memory, config.name, lane.count_unread)
    return Tenant(config, Catalog(), lane, uploads, unread)


def slots(config: TenantConfig) -> int:
    """The number of slots of a tenant's link."""
    return config.queue + SPARE_SLOTS


class LocalFrontend:
    """A tenant served in the device process; see `frontend.Frontend`. `only`: it is the only tenant."""

    def __init__(self, config: TenantConfig, descriptors: Descriptors, link: Link, only: bool = False) -> None:
        self.link = link
        self.tenant = open_tenant(config, link, self)
        self._descriptors = descriptors
        self._only = only
        self._cores_before: set[int] | None = None
        self._device: DeviceSide | None = None

    def __repr__(self) -> str:
        return f"<LocalFrontend {self.tenant.lane!r}>"

    def open(self, device: DeviceSide) -> None:
        self._device = device
        self.tenant.lane.open(asyncio.get_running_loop())

    def announce(self, name: str) -> None:
        self.tenant.catalog.announce(name)

    async def agree(self, name: str) -> str:
        return ""

    async def publish(self, name: str, served: list[ServedModel], problems: list[IndexEntry]) -> bool:
        await publish(self.tenant, name, served, problems)
        return True

    async def last_uses(self) -> Mapping[ModelKey, int]:
        return last_uses(self.tenant)

    async def page_out(self, model: ModelKey) -> bool:
        return page_out(self.tenant, model)

    def page_in(self, model: ModelKey) -> None:
        self.tenant.catalog.paged.discard(model)

    def set_cores(self, cores: frozenset[int] | None) -> None:
        """If this is the only tenant, move the event loop to its cores: two threads that alternate on one interpreter wake each
        other fastest on one core. With several tenants, requests of the others would run on this one's cores.
        """
        if self._only and cores:
            self._cores_before = self._cores_before or os.sched_getaffinity(0)
            try:
                os.sched_setaffinity(0, cores)
            except OSError as error:
                log.warning("the event loop cannot run on cores %s: %s", sorted(cores), error.strerror)

    async def report(self) -> Report:
        return report(self.tenant)

    def refuse(self, reason: str) -> None:
        self.tenant.refuse(reason)

    def suspend(self, reason: str) -> None:
        self.tenant.suspend(reason)

    def fail_in_flight(self, reason: str, queued: bool = True) -> None:
        self.tenant.fail_in_flight(reason, queued)

    async def relink(self, limit: float = math.inf) -> Callable[[], None]:
        return await asyncio.shield(self._relink(limit))

    async def _relink(self, limit: float) -> Callable[[], None]:
        unused = links.renew(self._descriptors)
        try:
            link = links.join(unused, self.link.shares_interpreter, self.link.arena.memory)
            if not await self.tenant.lane.relink(link, limit):
                raise Conflict(not_ended(self.tenant.name, limit))
            self.link = link
            unused, self._descriptors = self._descriptors, unused
            return unused.close
        except BaseException:
            unused.close()
            raise

    async def drained(self) -> None:
        await self.tenant.lane.drained()

    def close(self) -> None:
        self.tenant.lane.close(asyncio.get_running_loop())
        if self._cores_before:
            os.sched_setaffinity(0, self._cores_before)
        self._descriptors.close()

    def cancel(self, slot: int, serial: int) -> None:
        if self._device:
            self._device.cancel(self.tenant.name, slot, serial)


def open_local(config: TenantConfig, only: bool = False) -> LocalFrontend:
    """A frontend in this process; `only`: its tenant is the only one. `close` it in the end."""
    descriptors = links.create(slots(config), config.memory)
    return LocalFrontend(config, descriptors, links.join(descriptors, shares_interpreter=only), only)


async def publish(tenant: Tenant, name: str, served: list[ServedModel], problems: list[IndexEntry]) -> None:
    """Serve exactly these versions of a model; return when no request is left for those that they replace.

    An answer in parts goes on for `FINISH_SECONDS` at most: its client decides how long it takes, and the model's next load
    waits for it, and a repartition too. Functions are run before; a version whose `model.py` fails is not served.
    """
    before = [item for item in tenant.catalog.served() if item.name == name]
    served, problems = await _with_functions(tenant, served, problems, before)
    kept = {item.key for item in served}
    left = [item for item in before if item.key not in kept]
    tenant.catalog.put(name, served, problems)
    for key in [item.key for item in left]:
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS):
                await tenant.lane.model_drained(key)
        tenant.lane.end_parts(key, f"model {name!r} was unloaded or replaced while it answered; send the request again")
        await tenant.lane.model_drained(key)
    close_all([each for item in left for each in (item.running, item.text)])


async def _with_functions(
    tenant: Tenant, served: list[ServedModel], problems: list[IndexEntry], before: list[ServedModel]
) -> tuple[list[ServedModel], list[IndexEntry]]:
    """The versions with their functions running, and the problems of all. What runs already goes on."""
    if not any(item.functions or item.tokenizer for item in served):
        return served, problems
    there = {item.key: item for item in before}
    found, config, problems = list[ServedModel](), tenant.config, list(problems)
    setting = dotted(("tenants", tenant.name, "queue"))
    for item in served:
        try:
            running, text = (old.running, old.text) if (old := there.get(item.key)) else (None, None)
            if item.functions and running is None:
                running = await open_functions(item.functions, item.name, config.queue, setting, tenant.execution_limit)
            if item.tokenizer and text is None:
                text = await _text(tenant, item, setting)
            found.append(replace(item, running=running, text=text))
        except FunctionsFailed as error:
            log.error("model %s %s is unavailable: %s", item.name, item.version, error)
            problems.append(IndexEntry(item.name, item.version, "UNAVAILABLE", str(error)))
    return found, problems


async def _text(tenant: Tenant, item: ServedModel, setting: str) -> RunningText | None:
    """The tokenizer of a version; None, with a line in the log, if it cannot be used: the model is served all the same."""
    queue, limit = tenant.config.queue, tenant.execution_limit
    try:
        return await open_text(item.tokenizer, item.name, item.signature, queue, setting, limit)
    except TokenizerFailed as error:
        log.warning("model %s %s does not take texts: %s", item.name, item.version, error)
        return None


def last_uses(tenant: Tenant) -> dict[ModelKey, int]:
    """As `Frontend.last_uses`."""
    return {served.key: served.statistics.last for served in tenant.catalog.served()}


def page_out(tenant: Tenant, model: ModelKey) -> bool:
    """As `Frontend.page_out`: at one moment, so that a request comes either before that, or is the first one after it."""
    if tenant.lane.has_requests(model):
        return False
    tenant.catalog.paged.add(model)
    return True


def report(tenant: Tenant) -> Report:
    """The current report of a tenant."""
    backlog = tenant.lane.backlog()
    served = [ModelReport(s.name, s.version, s.statistics, backlog[s.key]) for s in tenant.catalog.served()]
    lane, lender = tenant.lane, tenant.lane.lender
    lending = (lender.guard.lends, lender.guard.stops) if lender else None
    return Report(served, tenant.catalog.index(), lane.statistics(), lane.slots.statistics(), lending=lending)
