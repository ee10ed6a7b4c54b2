"""The messages between the supervisor and the HTTP processes. `rpc` carries them as MessagePack.

Their fields are plain types, and what mirrors a class of ours (`message_fields`).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from ...accounts.usage import Count
from ...config.changes import LIVE_OF_SERVER, with_options, with_tables
from ...config.schema import Config, ModelOptions
from ...config.tenant import TenantConfig
from ...tenants.catalog import IndexEntry, ServedModel
from ...tenants.frontend import State
from .config_fields import tuples_of, values_of
from .message_fields import Fields, ServedModelFields


class Message(Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages; on the wire an array of the class's name and its fields."""


# From the supervisor to an HTTP process. `tenants.frontend` says what most of them are for.


class Announce(Message):
    """A model of this name is being loaded."""

    name: str


class Listed(Message):
    """Every model that there is was announced."""


class Publish(Message):
    """Serve these versions of a model from now on. A call: answered with True when no request for older ones is left.

    For a tenant on several devices, `keys` are the keys that each version has there: by its key in `served`, by device.
    """

    name: str
    served: list[ServedModelFields]
    problems: list[IndexEntry]
    keys: dict[str, dict[str, str]] = {}

    @classmethod
    def of(
        cls,
        name: str,
        served: Sequence[ServedModel],
        problems: Sequence[IndexEntry],
        keys: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> "Publish":
        of_devices = {key: dict(each) for key, each in keys.items()}
        return cls(name, [ServedModelFields.of(each) for each in served], list(problems), of_devices)


class OpenFunctions(Message):
    """Run the functions of versions that are about to be published. A call: answered as `Frontend.agree`."""

    name: str
    served: list[ServedModelFields]


class CloseFunctions(Message):
    """What `OpenFunctions` has run for this model will not be published."""

    name: str


class GetLastUses(Message):
    """A call: answered with when each version's last request was answered, by key; see `Frontend.last_uses`."""


class PageOut(Message):
    """Show a version, by its key, as paged out. A call: answered with False if a request for it is queued or in flight."""

    model: str


class PageIn(Message):
    """Do not show this version as paged out any more."""

    model: str


class SetAffinity(Message):
    """Run on these of the host's cores only."""

    cores: frozenset[int]


class SetState(Message):
    """The state of the server, and how far its start is."""

    state: State
    progress: str = ""


class Reconfigure(Message):
    """Use these values of the configuration from now on: those keys of [server] that may change, and all of these tenants.

    `options` are the tables [models.NAME]. A call: answered with True when that is so.
    """

    server: dict[str, Any]
    tenants: dict[str, TenantConfig]
    options: dict[str, ModelOptions]

    @classmethod
    def of(cls, config: Config) -> "Reconfigure":
        return cls(values_of(config.server, LIVE_OF_SERVER), dict(config.tenants), dict(config.models.options))

    def config(self, before: Config) -> Config:
        """The configuration, which was this one before."""
        server = before.server.model_copy(update=tuples_of(self.server))
        return with_options(with_tables(before, server, self.tenants), self.options)


class SetLogLevel(Message):
    """Log what is of this level or more severe."""

    level: str


class Heartbeat(Message):
    """The supervisor does not hang. Answered with `HeartbeatAnswer`."""


class Refuse(Message):
    """Take no more requests."""

    reason: str


class Suspend(Message):
    """Take no requests for now; with an empty reason take them again. With a `device`: send it none."""

    reason: str
    device: str = ""


class FailInFlight(Message):
    """The device side has ended: fail what was launched, with `queued` also what waits. See `Lane.fail_in_flight`.

    With a `device`, the tenant has others too: fail what was launched there.
    """

    reason: str
    queued: bool
    device: str = ""


class LoseModels(Message):
    """The device side has ended: every model is loading until it is published again."""


class Relink(Message):
    """Use a link with these descriptors, which were sent by this number, to the same tensor memory. See `Lane.relink`.

    A call: answered with True when the link is used, and with False if what is in flight does not end within `limit` seconds.
    With a `device` it is one of several links, and nothing is in flight on the one that it replaces.
    """

    number: Count
    slots: Count
    nbytes: Count
    limit: float
    device: str = ""


class AddHelper(Message):
    """To a lead: take the requests of a helper of this number over the link with these descriptors, sent by `descriptors`.

    The last descriptor is the socket of the helper's cancellations. A call: answered with True once a helper of the same number
    before, which has ended, is forgotten.
    """

    number: Count
    descriptors: Count
    slots: Count
    nbytes: Count


class GetReport(Message):
    """A call: answered with `ReportFields`."""


class WaitUntilIdle(Message):
    """A call: answered when every request that was taken has been answered."""


class Listen(Message):
    """The tenant has come: accept connections on its own port."""


class Exit(Message):
    """Exit once the requests on all connections, those that were handed over included, are answered."""


# From an HTTP process to the supervisor.


class CancelTicket(Message):
    """Stop a ticket that was sent over the link, if it can be stopped."""

    slot: Count
    serial: Count


class GetTotals(Message):
    """The report of all of the tenant's HTTP processes together. A call: answered with `ReportFields`."""


class ForwardedRequest(Message):
    """A whole request; its body holds only what the HTTP process has checked. A call: answered with `ForwardedAnswer`."""

    method: str
    raw_path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    body: bytes
    client: tuple[str, int] | None


class ForwardedAnswer(Fields):
    """A whole answer; `fields` are its headers without Content-Length."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes


class HeartbeatAnswer(Message):
    """The answer to a `Heartbeat`."""
