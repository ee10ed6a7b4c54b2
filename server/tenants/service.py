"""What the HTTP side knows: the tenants, the models of those served in this process, and the server's state."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from ..config.schema import Config
from ..config.tables import dotted
from ..config.tenant import TenantConfig
from ..errors import LimitExceeded, Misdirected, Unavailable
from ..link import activity
from ..link.messages import ModelKey
from ..link.occupancy import LEAD, Occupancy, SharedBlocks
from ..link.ring import Link
from ..protocol.request import Limits
from ..scheduling.lane import Lane
from ..scheduling.lender import Lender, Neighbour
from ..scheduling.limits import CONNECTIONS, LARGE_BODIES, RateLimits, SharedRateLimits, TokenBucket
from ..scheduling.pending import Canceller
from ..scheduling.scheduler import HelperScheduler, Scheduler
from .answers import Statistics
from .auth import Tenancy
from .catalog import Catalog, IndexEntry, ServedModel, none_ready
from .frontend import ModelReport, Report, State
from .model_changes import ModelChanges
from .tracing import Tracing
from .unread import UnreadAnswers
from .uploads import Uploads

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
    publishing: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """By model: held until what was published has taken the place of what was served before."""
    staged: dict[str, list[ServedModel]] = field(default_factory=dict)
    """By model, versions whose functions run already, and which are about to be published; see `publishing.agree`."""

    @property
    def name(self) -> str:
        return self.config.name

    def use_page(self, tenants: Mapping[str, TenantConfig], page: int, number: int = 1) -> None:
        """Let others of `tenants`, which are all of the configuration, know from now on when there are requests, and lend to
        those that borrow, if it does.

        `page` is the descriptor of its activity pages, `number` that of the process.
        """
        own = activity.attach(page, number)
        borrowers = [place for place, each in enumerate(tenants.values()) if each.burst and each.name != self.name]
        own.expect(borrowers)
        lend = tenants[self.name].lend
        self.lane.admission.neighbour = Lender(self.name, own, lend) if lend and borrowers else Neighbour(own)

    def callable(self, name: str, version: str | None = None) -> ServedModel:
        """A model that may be called now, as `Catalog.find`. Raises Unavailable too while its inferences would be refused."""
        served = self.catalog.find(name, version)
        if why := self.lane.admission.refusing:
            raise Unavailable(why)
        return served

    def index(self, there: Collection[str] | None = None, expected: Collection[str] = ()) -> list[IndexEntry]:
        """As `Catalog.index`, except that nothing is READY while inferences are refused."""
        entries, why = self.catalog.index(there, expected), self.lane.admission.refusing
        return [replace(e, state="UNAVAILABLE", reason=why) if why and e.state == "READY" else e for e in entries]

    def refuse(self, reason: str) -> None:
        """Refuse new requests, and those whose bodies are still arriving."""
        self.lane.admission.refusing = reason
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
    """Belongs to the event loop. It has the whole configuration: routes read tables of it, and a reload replaces it."""

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
        self._progress = ""
        self.totals: Callable[[], Awaitable[Report]] | None = None
        """Returns the report of all processes of the tenant, if it has several."""
        self._max_silence = config.server.watchdog / 4 or float("inf")
        self._heartbeat_at = float("inf")

    def __repr__(self) -> str:
        return f"<Service {self.state}, of {', '.join(self.tenants) or 'no tenant'}>"

    @property
    def unready(self) -> str | None:
        """Why the server is not ready; None if it is: loading has finished, it is not stopping, and the supervisor, if
        it is another process, has sent a heartbeat recently.
        """
        if self.state == "incomplete" and not self.config.server.strict_readiness:
            return "no tenant is served a model; POST /v2/repository/index says why"
        if self.state == "incomplete":
            which = "POST /v2/repository/index says which of a tenant's, the log which of all"
            return f"not every model could be loaded, and server.strict_readiness asks for all of them; {which}"
        if self.state != "serving":
            return f"the server is {self.state}{': ' * bool(self._progress)}{self._progress}"
        suspended = [tenant.lane.admission.suspended for tenant in self.tenants.values()]
        if suspended and all(suspended):
            return suspended[0]
        if self.tenants and all(each.catalog.expected or none_ready(each.index()) for each in self.tenants.values()):
            return f"{' and '.join(map(repr, self.tenants))} is served no model; POST /v2/repository/index says why"
        silence = time.monotonic() - self._heartbeat_at
        return None if silence <= self._max_silence else f"the supervisor has been silent for {silence:.0f} s"

    async def statistics(self, served: Iterable[ServedModel]) -> Statistics:
        """What all processes counted of these models."""
        found = {}
        if self.totals:
            found = {(each.name, each.version): each.statistics for each in (await self.totals()).served}
        counted = [(each, found.get((each.name, each.version), each.statistics)) for each in served]
        return Statistics([statistics.answer(each.name, each.version) for each, statistics in counted])

    def reconfigure(self, config: Config) -> None:
        """Use this configuration from now on: its keys, rights and hosts. A tenant that it has no more keeps its own."""
        self.config = config
        self.tenancy = Tenancy(config.tenants.values(), config.server.default_tenant)
        for name, tenant in self.tenants.items():
            if name in config.tenants:
                tenant.config = config.tenants[name]
                tenant.catalog.weigh(config.version_weights(name))

    def heartbeat(self) -> None:
        """The supervisor does not hang; called repeatedly if it is another process."""
        self._heartbeat_at = time.monotonic()

    def set_state(self, state: State, progress: str = "") -> None:
        """Set the server's state, and how far its start is."""
        self.state, self._progress = state, progress

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


def open_tenant(config: TenantConfig, link: Link, control: Canceller, occupancy: Occupancy | None = None) -> Tenant:
    """A tenant without models yet. `occupancy` is set if it has several HTTP processes, and says which this is."""
    queue, memory = (dotted(("tenants", config.name, key)) for key in ("queue", "memory"))
    blocks = SharedBlocks(config.memory, memory, occupancy) if occupancy else None
    helper = occupancy is not None and occupancy.number != LEAD
    scheduler: Scheduler
    if occupancy and helper:
        scheduler = HelperScheduler(slots(config), config.queue, queue, occupancy)
    else:
        scheduler = Scheduler(config.queue, config.in_flight, HORIZON, queue)
    lane = Lane(config.name, scheduler, link, control, blocks, helper)
    uploads = Uploads(config.memory, lambda text: lane.admission.reject(f"{text} ({memory})"), occupancy=occupancy)
    unread = UnreadAnswers(config.memory, config.name, lane.admission.count_unread)
    catalog = Catalog()
    catalog.expected = config.may_call
    return Tenant(config, catalog, lane, uploads, unread)


def slots(config: TenantConfig) -> int:
    """The number of slots of a tenant's link."""
    return config.queue + SPARE_SLOTS


def last_uses(tenant: Tenant) -> dict[ModelKey, int]:
    """As `HttpSide.last_uses`."""
    return {served.key: served.statistics.last for served in tenant.catalog.served()}


def page_out(tenant: Tenant, model: ModelKey) -> bool:
    """As `HttpSide.page_out`: at one moment, so that a request comes either before that, or is the first one after it."""
    if tenant.lane.has_requests(model):
        return False
    tenant.catalog.paged.add(model)
    return True


def report(tenant: Tenant) -> Report:
    """The current report of a tenant."""
    backlog = tenant.lane.backlog()
    served = [ModelReport(s.name, s.version, s.statistics, backlog[s.key]) for s in tenant.catalog.served()]
    lane, neighbour = tenant.lane, tenant.lane.admission.neighbour
    lending = (neighbour.guard.lends, neighbour.guard.stops) if isinstance(neighbour, Lender) else None
    return Report(served, tenant.index(), lane.statistics(), lane.slots.statistics(), lending=lending)


def limit(tenant: Tenant, config: TenantConfig, max_body: int, occupancy: Occupancy | None = None) -> None:
    """Limit this tenant's requests and bodies from now on, as its configuration says.

    `max_body` is in bytes; `occupancy` is set if the tenant has several HTTP processes.
    """
    before = tenant.lane.admission.limits
    limits = _rates(config, max_body, occupancy)
    if limits:
        limits.take_over(before)
    tenant.lane.admission.limits = limits
    tenant.uploads.limit_large(config.max_large_bodies, lambda text: _exceeded(tenant, LARGE_BODIES, text))


def too_many_connections(tenant: Tenant, most: int) -> LimitExceeded:
    """Count a connection beyond the tenant's limit; returns the error for its first request."""
    return _exceeded(
        tenant, CONNECTIONS, f"{most} connections may be open, and as many are. Send requests on those, or close some"
    )


def _rates(config: TenantConfig, max_body: int, occupancy: Occupancy | None) -> RateLimits | None:
    """The buckets of the tenant, None if neither rate is limited."""
    requests = nbytes = None
    if (rate := config.requests_per_second) is not None:
        requests = TokenBucket(rate, config.burst_requests or rate)
    if (rate := config.bytes_per_second) is not None:
        nbytes = TokenBucket(rate, config.burst_bytes or max(rate, max_body))
    if requests is None and nbytes is None:
        return None
    if occupancy is not None:
        return SharedRateLimits(config.name, requests, nbytes, occupancy)
    return RateLimits(config.name, requests, nbytes)


def _exceeded(tenant: Tenant, key: str, text: str) -> LimitExceeded:
    error = LimitExceeded(f"{dotted(('tenants', tenant.name, key))}: {text}", key)
    tenant.lane.admission.count_limited(error)
    return error
