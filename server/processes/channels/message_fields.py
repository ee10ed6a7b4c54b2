"""Parts of messages that mirror classes of ours, and what msgspec does not know to encode.

msgspec checks what arrives by the annotations of fields, which classes compiled by mypyc do not keep: of those the fields are
named here again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import asdict

from engines import DATATYPES

from ...config.schema import ModelOptions
from ...config.tables import Section
from ...config.tenant import TenantConfig
from ...config.text import TextOptions
from ...protocol.classification import Labels
from ...scheduling.lane_statistics import LaneStatistics, SlotStatistics
from ...tenants.catalog import IndexEntry
from ...tenants.frontend import ModelReport, Report
from ...tenants.statistics import BOUNDS, FIRST_BOUNDS, ModelStatistics, Responses, Size


class Fields(Struct, array_like=True, forbid_unknown_fields=True):
    """Base of parts of messages that mirror a class of ours, with the same fields."""


_Size = tuple[int, int, int, int, int, int]
_Responses = tuple[int, int, int, int, int, int, int, int, int]
_NUMPY = {each.numpy.str: each.numpy for each in DATATYPES.values()}
"""NumPy parses what it is given as a type, and may raise a SyntaxError."""
_of_size, _of_responses = (attrgetter(*(each.name for each in fields(kind))) for kind in (Size, Responses))


class StatisticsFields(Fields):
    """A `ModelStatistics`, with the fields of each `Size` and `Responses` in their order."""

    sizes: dict[int, _Size]
    joined: _Size
    joined_rows: int
    runs: dict[int, _Size]
    last_run: int
    buckets: Annotated[list[int], Meta(min_length=len(BOUNDS) + 1, max_length=len(BOUNDS) + 1)]
    failures: dict[str, int]
    failed_ns: int
    last: int
    responses: dict[int, _Responses]
    firsts: Annotated[list[int], Meta(min_length=len(FIRST_BOUNDS) + 1, max_length=len(FIRST_BOUNDS) + 1)]
    firsts_ns: int

    @classmethod
    def of(cls, statistics: ModelStatistics) -> "StatisticsFields":
        plain = {name: getattr(statistics, name) for name in cls.__struct_fields__}
        for name in ("sizes", "runs"):
            plain[name] = {rows: _of_size(size) for rows, size in plain[name].items()}
        responses = {number: _of_responses(each) for number, each in statistics.responses.items()}
        return cls(**{**plain, "joined": _of_size(statistics.joined), "responses": responses})

    def statistics(self) -> ModelStatistics:
        sizes, runs = ({rows: Size(*size) for rows, size in each.items()} for each in (self.sizes, self.runs))
        responses, joined = {number: Responses(*each) for number, each in self.responses.items()}, Size(*self.joined)
        return ModelStatistics(**{**asdict(self), "sizes": sizes, "joined": joined, "runs": runs, "responses": responses})


class ReportFields(Fields):
    """A `Report`, with the fields of each `ModelReport` in their order."""

    served: list[tuple[str, str, StatisticsFields, int]]
    index: list[IndexEntry]
    lane: LaneStatistics
    slots: SlotStatistics
    lending: tuple[bool, int] | None

    @classmethod
    def of(cls, report: Report) -> "ReportFields":
        served = [(each.name, each.version, StatisticsFields.of(each.statistics), each.pending) for each in report.served]
        return cls(served, list(report.index), report.lane, report.slots, report.lending)

    def report(self) -> Report:
        served = [ModelReport(name, version, found.statistics(), pending) for name, version, found, pending in self.served]
        return Report(served, self.index, self.lane, self.slots, lending=self.lending)


def encode_hook(value: Any) -> Any:
    """Encode the types that msgspec does not know: data types of numpy, in signatures, tables of the configuration, labels of
    classes, and views of dicts.
    """
    if isinstance(value, np.dtype):
        return value.str
    if isinstance(value, (ModelOptions, TenantConfig, TextOptions)):
        return values_of(value, list(type(value).model_fields))
    if isinstance(value, Labels):
        return dict(value.files)
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def decode_hook(kind: Any, value: Any) -> Any:
    """Decode them again. Raises TypeError or ValueError."""
    if kind is ModelOptions:
        return _options_of(msgspec.convert(value, dict[str, Any]))
    if kind is TenantConfig:
        return _tenant_of(msgspec.convert(value, dict[str, Any]))
    if kind is Labels:
        return Labels(msgspec.convert(value, dict[str, bytes]))
    if value not in _NUMPY:
        raise ValueError("expected a data type of the protocol")
    return _NUMPY[value]


def _tenant_of(fields: dict[str, Any]) -> TenantConfig:
    """The tenant's configuration of these values."""
    return TenantConfig.model_construct(**tuples_of(fields))


def _options_of(fields: dict[str, Any]) -> ModelOptions:
    """The table [models.NAME] of these values, with the class of `text` again."""
    text = fields.get("text")
    return ModelOptions.model_construct(**tuples_of(fields) | {"text": text and TextOptions.model_construct(**text)})


def values_of(table: Section, keys: Sequence[str]) -> dict[str, Any]:
    return {key: getattr(table, key) for key in keys}


def tuples_of(values: dict[str, Any]) -> dict[str, Any]:
    """These values with tuples again where MessagePack has made lists of them."""
    return {key: _tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _tuple(value: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuple(each) if isinstance(each, list) else each for each in value)
