"""What the supervisor and HTTP processes call in each other; `server.tenants.frontend` describes most of it.

HTTP processes parse bytes of untrusted clients: each is served what it may call, with the bounds of the arguments.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from msgspec import Meta

from ...accounts.usage import Count
from ...config.changes import LIVE_OF_SERVER, with_options, with_tables
from ...config.schema import Config, ModelOptions
from ...config.tenant import TenantConfig
from ...tenants.catalog import IndexEntry, ModelVersion
from ...tenants.frontend import Report, State
from .descriptors import SentLink
from .message_fields import tuples_of, values_of

_MOST_HEADERS = 1 << 14
"""More than fit into the longest head that is served."""


class Live(NamedTuple):
    """The configuration as it may change while a process runs: keys of [server], all tenants, and the tables [models.NAME]."""

    server: dict[str, Any]
    tenants: dict[str, TenantConfig]
    options: dict[str, ModelOptions]

    @classmethod
    def of(cls, config: Config) -> "Live":
        return cls(values_of(config.server, LIVE_OF_SERVER), dict(config.tenants), dict(config.models.options))

    def config(self, before: Config) -> Config:
        """The configuration, which was this one before."""
        server = before.server.model_copy(update=tuples_of(self.server))
        return with_options(with_tables(before, server, self.tenants), self.options)


class Wanted(NamedTuple):
    """What an HTTP process is to be, whole: it follows the last one that it was sent.

    `cores` are those of the host on which it runs, None to stay where it is. `listed`: every model that there is was announced.
    With a reason in `refused` or `suspended` it takes no requests of its tenant, for good or for now.
    """

    state: State = "starting"
    progress: str = ""
    cores: frozenset[int] | None = None
    listed: bool = False
    refused: str = ""
    suspended: str = ""


class Logging(Protocol):
    """Any process but the dispatcher."""

    def set_log_level(self, level: str) -> None:
        """Log what is of this level or more severe."""


class ToTenant(Protocol):
    """The tenant of an HTTP process, if it has one."""

    def announce(self, name: str) -> None: ...
    async def publish(self, name: str, served: list[ModelVersion], problems: list[IndexEntry]) -> bool:
        """Serve these versions of a model from now on. Returns True when no request for older ones is left."""

    async def agree(self, name: str, served: Sequence[ModelVersion]) -> str: ...
    def withdraw(self, name: str) -> None: ...
    async def last_uses(self) -> Mapping[str, int]: ...
    async def page_out(self, model: str) -> bool: ...
    def page_in(self, model: str) -> None: ...
    def fail_in_flight(self, reason: str, queued: bool) -> None:
        """The device side has ended: fail what was launched, with `queued` also what waits. See `Lane.fail_in_flight`.

        With `queued` every model is loading until it is published again.
        """

    async def relink(self, link: SentLink, limit: float) -> bool:
        """Use this link to the same tensor memory, see `Lane.relink`. True when it is used, and False if what is in flight does
        not end within `limit` seconds.
        """

    async def add_helper(self, number: Count, link: SentLink) -> None:
        """To a lead: take the requests of a helper of this number over this link; its last descriptor is the socket of the
        helper's cancellations. Returns once a helper of the same number before, which has ended, is forgotten.
        """

    async def report(self) -> Report: ...
    async def drained(self) -> None: ...


class ToHttp(Protocol):
    """An HTTP process."""

    def follow(self, wanted: Wanted) -> None:
        """Be like this from now on."""

    async def reconfigure(self, live: Live) -> None:
        """Use these values of the configuration from now on. Returns when that is so."""

    async def heartbeat(self) -> None:
        """The supervisor does not hang, nor does this process if it answers."""

    def listen(self) -> None:
        """The tenant has come: accept connections on its own port."""

    def exit(self) -> None:
        """Exit once the requests on all connections, those that were handed over included, are answered."""


class ToHttpProcess(ToHttp, ToTenant, Logging, Protocol):
    """An HTTP process, with its tenant if it has one."""


class ForwardedRequest(NamedTuple):
    """A whole request; its body holds only what the HTTP process has checked."""

    method: str
    raw_path: bytes
    query: bytes
    headers: Annotated[dict[bytes, bytes], Meta(max_length=_MOST_HEADERS)]
    body: bytes
    client: tuple[str, int] | None


class ForwardedAnswer(NamedTuple):
    """A whole answer; `fields` are its headers without Content-Length."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes


class FromHttpProcess(Protocol):
    """The supervisor, for each HTTP process."""

    async def forward(self, request: ForwardedRequest) -> ForwardedAnswer:
        """Answer a request that HTTP processes do not answer."""


class FromHelper(Protocol):
    """The supervisor, for each HTTP process of a tenant."""

    async def report(self) -> Report:
        """The report of all of the tenant's HTTP processes together."""


class FromLead(Protocol):
    """The supervisor, for the lead of a tenant's HTTP processes."""

    def cancel(self, slot: Count, serial: Count) -> None:
        """Stop a ticket that was sent over the link, if it can be stopped."""
