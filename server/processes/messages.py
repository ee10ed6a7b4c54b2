"""The messages between the device process and the HTTP processes. `rpc` carries them as MessagePack.

Only plain types, and classes that are never compiled, are fields: msgspec checks what arrives by their annotations, which
classes compiled by mypyc do not keep.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import asdict

from engines import Signature

from ..config.changes import LIVE_OF_SERVER, with_options, with_tables
from ..config.schema import Config, ModelOptions
from ..config.section import Section
from ..config.tenant import TenantConfig
from ..config.text import TextOptions
from ..functions.definition import Functions
from ..protocol.classification import Labels
from ..scheduling.batching import Batching
from ..scheduling.lane_statistics import LaneStatistics
from ..scheduling.queue_policy import QueueLimits, QueuePolicy
from ..scheduling.slot_pool import SlotStatistics
from ..tenants.catalog import IndexEntry, ServedModel
from ..tenants.frontend import ModelReport, Report, State
from ..tenants.statistics import BOUNDS, FIRST_BOUNDS, ModelStatistics, Responses, Size

Count = Annotated[int, Meta(ge=0)]


class Message(Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages; on the wire an array of the class's name and its fields."""


class Fields(Struct, array_like=True, forbid_unknown_fields=True):
    """Base of parts of messages that mirror a class of ours, with the same fields."""


_F = TypeVar("_F", bound=Fields)


def mirror(kind: type[_F], value: Any) -> _F:
    return kind(*(getattr(value, name) for name in kind.__struct_fields__))


class BatchingFields(Fields):
    """A `Batching`."""

    signature: Signature
    most: int
    delay: float
    preferred: tuple[int, ...]


class QueueLimitsFields(Fields):
    """A `QueueLimits`."""

    size: int
    timeout: float
    key: str


class QueuePolicyFields(Fields):
    """A `QueuePolicy`."""

    limits: QueueLimitsFields
    levels: int
    default: int
    by_priority: dict[int, QueueLimitsFields]

    @classmethod
    def of(cls, policy: QueuePolicy) -> "QueuePolicyFields":
        by_priority = {level: mirror(QueueLimitsFields, limits) for level, limits in policy.by_priority.items()}
        return cls(mirror(QueueLimitsFields, policy.limits), policy.levels, policy.default, by_priority)

    def policy(self) -> QueuePolicy:
        by_priority = {level: QueueLimits(**asdict(limits)) for level, limits in self.by_priority.items()}
        return QueuePolicy(QueueLimits(**asdict(self.limits)), self.levels, self.default, by_priority)


class ServedModelFields(Fields):
    """A `ServedModel`, without the counters and caches, which stay in the process that has them."""

    name: str
    version: str
    key: str
    signature: Signature
    platform: str
    config: dict[str, Any]
    batching: BatchingFields | None
    labels: dict[str, bytes]
    queues: QueuePolicyFields | None
    functions: Functions | None = None
    tokenizer: str = ""

    @classmethod
    def of(cls, served: ServedModel) -> "ServedModelFields":
        batching = mirror(BatchingFields, served.batching) if served.batching else None
        queues = QueuePolicyFields.of(served.queues) if served.queues else None
        plain = served.name, served.version, served.key, served.signature, served.platform, served.config
        return cls(*plain, batching, dict(served.labels.files), queues, served.functions, served.tokenizer)

    def served(self) -> ServedModel:
        batching = Batching(**asdict(self.batching)) if self.batching else None
        queues = self.queues.policy() if self.queues else None
        plain = self.name, self.version, self.key, self.signature, self.platform, self.config
        return ServedModel(*plain, batching, Labels(self.labels), queues, self.functions, self.tokenizer)


# From the device process to an HTTP process. `tenants.frontend` says what most of them are for.


class Announce(Message):
    """A model of this name is being loaded."""

    name: str


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
    """The state of the server."""

    state: State


class Reconfigure(Message):
    """Use these values of the configuration from now on: those keys of [server] that may change, and all of these tenants.

    `options` are the tables [models.NAME]. A call: answered with True when that is so.
    """

    server: dict[str, Any]
    tenants: dict[str, dict[str, Any]]
    options: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, config: Config) -> "Reconfigure":
        tenants = {name: fields_of(each) for name, each in config.tenants.items()}
        options = options_fields(config.models.options)
        return cls(_values(config.server, LIVE_OF_SERVER), tenants, options)

    def config(self, before: Config) -> Config:
        """The configuration, which was this one before."""
        server = before.server.model_copy(update=_tuples(self.server))
        tenants = {name: tenant_of(fields) for name, fields in self.tenants.items()}
        return with_options(with_tables(before, server, tenants), options_of(self.options))


def fields_of(tenant: TenantConfig) -> dict[str, Any]:
    """A tenant's configuration as a message has it."""
    return _values(tenant, list(TenantConfig.model_fields))


def tenant_of(fields: dict[str, Any]) -> TenantConfig:
    """The tenant's configuration again."""
    return TenantConfig.model_construct(**_tuples(fields))


def options_fields(options: Mapping[str, ModelOptions]) -> dict[str, dict[str, Any]]:
    """Tables [models.NAME] as a message has them."""
    return {name: _values(each, list(ModelOptions.model_fields)) for name, each in options.items()}


def options_of(fields: Mapping[str, dict[str, Any]]) -> dict[str, ModelOptions]:
    """The tables again."""
    tables = {name: ModelOptions.model_construct(**_tuples(each)) for name, each in fields.items()}
    return {name: _with_text(each) for name, each in tables.items()}


def _with_text(options: ModelOptions) -> ModelOptions:
    """The same with the class of `text` again."""
    return options if options.text is None else options.model_copy(update={"text": TextOptions(*options.text)})


def _values(table: Section, keys: Sequence[str]) -> dict[str, Any]:
    return {key: getattr(table, key) for key in keys}


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """These values with tuples again where MessagePack has made lists of them."""
    return {key: _tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _tuple(value: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuple(each) if isinstance(each, list) else each for each in value)


class SetLogLevel(Message):
    """Log what is of this level or more severe."""

    level: str


class Heartbeat(Message):
    """The device process does not hang. Answered with `HeartbeatAnswer`."""


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


class Exit(Message):
    """Exit once the requests on all connections, those that were handed over included, are answered."""


# From an HTTP process to the device process.


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


class SizeFields(Fields):
    """A `Size`."""

    count: int
    total: int
    queue: int
    compute_input: int
    compute_infer: int
    compute_output: int


class ResponsesFields(Fields):
    """A `Responses`."""

    count: int
    compute_infer: int
    compute_output: int
    ends: int
    ends_ns: int
    failed: int
    failed_ns: int
    cancelled: int
    cancelled_ns: int


class StatisticsFields(Fields):
    """A `ModelStatistics`."""

    sizes: dict[int, SizeFields]
    joined: SizeFields
    joined_rows: int
    runs: dict[int, SizeFields]
    last_run: int
    buckets: Annotated[list[int], Meta(min_length=len(BOUNDS) + 1, max_length=len(BOUNDS) + 1)]
    failures: dict[str, int]
    failed_ns: int
    last: int
    responses: dict[int, ResponsesFields]
    firsts: Annotated[list[int], Meta(min_length=len(FIRST_BOUNDS) + 1, max_length=len(FIRST_BOUNDS) + 1)]
    firsts_ns: int

    @classmethod
    def of(cls, statistics: ModelStatistics) -> "StatisticsFields":
        found = mirror(cls, statistics)
        sizes, runs = ({rows: mirror(SizeFields, size) for rows, size in each.items()} for each in (found.sizes, found.runs))
        responses = {number: mirror(ResponsesFields, each) for number, each in found.responses.items()}
        joined = mirror(SizeFields, found.joined)
        return msgspec.structs.replace(found, sizes=sizes, joined=joined, runs=runs, responses=responses)

    def statistics(self) -> ModelStatistics:
        sizes, runs = ({rows: Size(**asdict(size)) for rows, size in each.items()} for each in (self.sizes, self.runs))
        responses = {number: Responses(**asdict(each)) for number, each in self.responses.items()}
        joined = Size(**asdict(self.joined))
        return ModelStatistics(**{**asdict(self), "sizes": sizes, "joined": joined, "runs": runs, "responses": responses})


class ModelReportFields(Fields):
    """A `ModelReport`."""

    name: str
    version: str
    statistics: StatisticsFields
    pending: int


class ReportFields(Fields):
    """A `Report`."""

    served: list[ModelReportFields]
    index: list[IndexEntry]
    lane: tuple[int, int, int, int, int, int, tuple[int, int, int, int], int]
    slots: tuple[int, int, int]
    lending: tuple[bool, int] | None

    @classmethod
    def of(cls, report: Report) -> "ReportFields":
        served = [
            ModelReportFields(each.name, each.version, StatisticsFields.of(each.statistics), each.pending)
            for each in report.served
        ]
        lane: Any = tuple(report.lane)
        slots: Any = tuple(report.slots)
        return cls(served, list(report.index), lane, slots, report.lending)

    def report(self) -> Report:
        served = [ModelReport(each.name, each.version, each.statistics.statistics(), each.pending) for each in self.served]
        statistics = LaneStatistics(*self.lane), SlotStatistics(*self.slots)
        return Report(served, self.index, *statistics, lending=self.lending)


def encode_hook(value: Any) -> Any:
    """Encode the types that msgspec does not know: data types of numpy, in signatures."""
    if isinstance(value, np.dtype):
        return value.str
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def decode_hook(_: Any, value: Any) -> Any:
    """Decode them again. Raises TypeError or ValueError."""
    return np.dtype(value)
