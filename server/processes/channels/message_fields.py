"""The parts of messages: each mirrors a class of ours, as messages have plain types only.

msgspec checks what arrives by the annotations of fields, which classes compiled by mypyc do not keep. So these are never
compiled.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import asdict

from engines import Signature

from ...config.schema import ModelOptions
from ...config.tenant import TenantConfig
from ...functions.definition import Functions
from ...protocol.classification import Labels
from ...scheduling.batching import Batching
from ...scheduling.lane_statistics import LaneStatistics, SlotStatistics
from ...scheduling.queue_policy import QueuePolicy
from ...tenants.catalog import IndexEntry, ServedModel
from ...tenants.frontend import ModelReport, Report
from ...tenants.statistics import BOUNDS, FIRST_BOUNDS, ModelStatistics, Responses, Size
from ...text.folder import TextFolder
from .config_fields import options_of, tenant_of, values_of


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
    queues: QueuePolicy | None
    functions: Functions | None = None
    folder: TextFolder | None = None

    @classmethod
    def of(cls, served: ServedModel) -> "ServedModelFields":
        batching = mirror(BatchingFields, served.batching) if served.batching else None
        plain = served.name, served.version, served.key, served.signature, served.platform, served.config
        return cls(*plain, batching, dict(served.labels.files), served.queues, served.functions, served.folder)

    def served(self) -> ServedModel:
        batching = Batching(**asdict(self.batching)) if self.batching else None
        plain = self.name, self.version, self.key, self.signature, self.platform, self.config
        return ServedModel(*plain, batching, Labels(self.labels), self.queues, self.functions, self.folder)


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
    lane: LaneStatistics
    slots: SlotStatistics
    lending: tuple[bool, int] | None

    @classmethod
    def of(cls, report: Report) -> "ReportFields":
        served = [
            ModelReportFields(each.name, each.version, StatisticsFields.of(each.statistics), each.pending)
            for each in report.served
        ]
        return cls(served, list(report.index), report.lane, report.slots, report.lending)

    def report(self) -> Report:
        served = [ModelReport(each.name, each.version, each.statistics.statistics(), each.pending) for each in self.served]
        return Report(served, self.index, self.lane, self.slots, lending=self.lending)


def encode_hook(value: Any) -> Any:
    """Encode the types that msgspec does not know: data types of numpy, in signatures, tables of the configuration, and views
    of dicts.
    """
    if isinstance(value, np.dtype):
        return value.str
    if isinstance(value, (ModelOptions, TenantConfig)):
        return values_of(value, list(type(value).model_fields))
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def decode_hook(kind: Any, value: Any) -> Any:
    """Decode them again. Raises TypeError or ValueError."""
    if kind is ModelOptions:
        return options_of(msgspec.convert(value, dict[str, Any]))
    if kind is TenantConfig:
        return tenant_of(msgspec.convert(value, dict[str, Any]))
    return np.dtype(value)
