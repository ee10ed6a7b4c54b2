"""What the HTTP side knows: who the tenants are, what each of those that are served here may call, and the server's state."""

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..config.schema import Config, TenantConfig
from ..config.tables import dotted
from ..errors import Misdirected
from ..link import ring as links
from ..link.ring import Descriptors, Link
from ..protocol.request import Limits
from ..scheduling.lane import Canceller, Lane
from ..scheduling.scheduler import Scheduler
from .auth import Tenancy
from .catalog import Catalog, IndexEntry, ServedModel
from .frontend import Backend, ModelReport, Report, State
from .model_changes import ModelChanges
from .uploads import Uploads

log = logging.getLogger("greenlane")

HORIZON = 200_000
"""Nanoseconds of short works that may be handed to a worker ahead: a few times what the way there and back takes."""
NOBODYS = 4 << 20
"""Bytes of bodies that may be on their way at a time to what is no tenant's: administrators', of which each has up to 1 MiB."""
SPARE = 256
"""Slots beyond those of a full queue: for what is in flight, being decoded, and being encoded."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant that is served here: what is configured, what it is served, its way to the worker, what comes for it, and the
    loads and unloads that it asked for.
    """

    config: TenantConfig
    catalog: Catalog
    lane: Lane
    uploads: Uploads
    changes: ModelChanges = field(default_factory=ModelChanges)

    @property
    def name(self) -> str:
        return self.config.name

    def refuse(self, reason: str) -> None:
        """Refuse new work, and what would become that once its body is here."""
        self.lane.refusing = reason
        self.uploads.refuse(reason)

    def suspend(self, reason: str) -> None:
        """The same for now, and for those that wait or run, too; with "" all is taken again."""
        self.lane.suspend(reason)
        if reason:
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
        self.uploads = Uploads(NOBODYS)
        self.state: State = "starting"
        self._patience = config.server.watchdog / 4 or float("inf")
        self._heard = float("inf")

    def __repr__(self) -> str:
        return f"<Service {self.state}, of {', '.join(self.tenants) or 'nobody'}>"

    @property
    def unready(self) -> str | None:
        """Why new work is not welcome; None when every model was tried, or loaded if that is asked for, nobody asked the server
        to stop, and the device's process, if that is another, was heard of a moment ago.
        """
        if self.state == "incomplete":
            which = "POST /v2/repository/index says which of a tenant's, the log which of all"
            return f"not every model could be loaded, and server.strict_readiness asks for all of them; {which}"
        if self.state != "serving":
            return f"the server is {self.state}"
        suspended = [tenant.lane.suspended for tenant in self.tenants.values()]
        if suspended and all(suspended):
            return suspended[0]
        silence = time.monotonic() - self._heard
        return None if silence <= self._patience else f"the device's process has been silent for {silence:.0f} s"

    @property
    def ready(self) -> bool:
        """Whether new work is welcome."""
        return self.unready is None

    @property
    def unanswered(self) -> int:
        """Requests of all tenants here that were accepted and are not answered yet."""
        lanes = [tenant.lane.statistics() for tenant in self.tenants.values()]
        return sum(lane.waiting + lane.in_flight for lane in lanes)

    def heartbeat(self) -> None:
        """The device's process, which is another, turns: it says so again and again from now on."""
        self._heard = time.monotonic()

    def set_state(self, state: State) -> None:
        """This is the server's state from now on."""
        self.state = state

    def tenant(self, authorization: str | None, name: str | None) -> Tenant:
        """Whose request this is, by its headers. Raises Unauthorized, or Misdirected for one who is served elsewhere."""
        who = self.tenancy.identify(authorization, name)
        try:
            return self.tenants[who.name]
        except KeyError:
            owner = " and ".join(f"tenant {name!r}" for name in self.tenants) or "no tenant"
            where = "to the server's common port" + (f", or to {who.port}, its own," if who.port else "")
            text = f"this connection belongs to {owner}; send requests of {who.name!r} {where} on another connection"
            raise Misdirected(text) from None


def open_tenant(config: TenantConfig, link: Link, control: Canceller) -> Tenant:
    """A tenant that is served nothing yet."""
    scheduler = Scheduler(config.queue, config.in_flight, HORIZON, dotted(("tenants", config.name, "queue")))
    lane = Lane(config.name, scheduler, link, control)
    memory = dotted(("tenants", config.name, "memory"))
    return Tenant(config, Catalog(), lane, Uploads(config.memory, lambda text: lane.reject(f"{text} ({memory})")))


def slots(config: TenantConfig) -> int:
    """How many slots a tenant's link has."""
    return config.queue + SPARE


class LocalFrontend:
    """A tenant served in the process that holds the device; see `frontend.Frontend`. `only` is whether there is no other."""

    def __init__(self, config: TenantConfig, descriptors: Descriptors, link: Link, only: bool = False) -> None:
        self.link = link
        self.tenant = open_tenant(config, link, self)
        self._descriptors = descriptors
        self._only = only
        self._before: set[int] | None = None
        self._device: Backend | None = None

    def __repr__(self) -> str:
        return f"<LocalFrontend {self.tenant.lane!r}>"

    def open(self, device: Backend) -> None:
        self._device = device
        self.tenant.lane.open(asyncio.get_running_loop())

    def announce(self, name: str) -> None:
        self.tenant.catalog.announce(name)

    async def publish(self, name: str, served: list[ServedModel], problems: list[IndexEntry]) -> bool:
        await publish(self.tenant, name, served, problems)
        return True

    def set_cores(self, cores: frozenset[int] | None) -> None:
        """An only tenant's cores become the event loop's: two threads that take turns with one interpreter wake each other
        soonest on one core. One of several tenants would have the others' requests on its cores.
        """
        if self._only and cores:
            self._before = self._before or os.sched_getaffinity(0)
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

    async def drained(self) -> None:
        await self.tenant.lane.drained()

    def close(self) -> None:
        self.tenant.lane.close(asyncio.get_running_loop())
        if self._before:
            os.sched_setaffinity(0, self._before)
        self._descriptors.close()

    def cancel(self, slot: int, serial: int) -> None:
        if self._device:
            self._device.cancel(self.tenant.name, slot, serial)


def open_local(config: TenantConfig, only: bool = False) -> LocalFrontend:
    """A frontend of this process, for its `only` tenant or one of several; its `close` frees what this takes.

    Several are never served much at a time: the others would wait for it.
    """
    descriptors = links.create(slots(config), config.memory)
    return LocalFrontend(config, descriptors, links.join(descriptors, shares_interpreter=only), only)


async def publish(tenant: Tenant, name: str, served: list[ServedModel], problems: list[IndexEntry]) -> None:
    """Serve these versions of a model to a tenant; return once no request is left for what they replace."""
    left = [item.key for item in tenant.catalog.served() if item.name == name]
    tenant.catalog.put(name, served, problems)
    for key in left:
        await tenant.lane.model_drained(key)


def report(tenant: Tenant) -> Report:
    """What was counted of a tenant."""
    backlog = tenant.lane.backlog()
    served = [ModelReport(s.name, s.version, s.statistics, backlog[s.key]) for s in tenant.catalog.served()]
    return Report(served, tenant.catalog.index(), tenant.lane.statistics(), tenant.lane.slots.statistics())
