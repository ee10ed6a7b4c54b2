"""Adds up the reports of one tenant's HTTP processes. Pure.

The lead's lane has the requests of all of them, and counts what it refuses and the batches that run; each process counts the
requests of its own connections.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from ..scheduling.lane_statistics import LaneStatistics, SlotStatistics
from .frontend import ModelReport, Report
from .statistics import ModelStatistics, Responses, Size

_N = TypeVar("_N", Size, Responses)
Version = tuple[str, str]
"""A model's name and version."""


def total(lead: Report, helpers: Sequence[Report]) -> Report:
    """The report of all these processes together, as old as the oldest of them."""
    helped = _by_version(helpers)
    served = []
    for each in lead.served:
        found = [each.statistics, *helped.get((each.name, each.version), ())]
        statistics = replace(added(found), runs=each.statistics.runs, last_run=each.statistics.last_run)
        served.append(replace(each, statistics=statistics))
    lane = _counted(lead.lane, [report.lane for report in (lead, *helpers)])
    slots = SlotStatistics(*map(sum, zip(lead.slots, *(report.slots for report in helpers), strict=True)))
    lending = [report.lending for report in (lead, *helpers) if report.lending]
    lends = (all(each for each, _ in lending), sum(stops for _, stops in lending)) if lending else None
    return Report(served, lead.index, lane, slots, max(report.age for report in (lead, *helpers)), lends)


def ended(reports: Sequence[Report], known: Container[Version]) -> Report:
    """What helpers that have ended counted of these versions, in one report. It keeps totals from falling, which a counter must
    not.
    """
    versions = _by_version(reports)
    served = [ModelReport(*version, added(found), 0) for version, found in versions.items() if version in known]
    last = reports[-1]
    lane = _counted(last.lane, [report.lane for report in reports])
    lending = True, sum(report.lending[1] for report in reports if report.lending)
    return Report(served, (), lane, SlotStatistics(0, 0, 0), lending=lending if last.lending else None)


def added(counted: Sequence[ModelStatistics]) -> ModelStatistics:
    """The sum of these statistics of one model, without `runs` and `last_run`."""
    failures: dict[str, int] = {}
    for each in counted:
        for reason, count in each.failures.items():
            failures[reason] = failures.get(reason, 0) + count
    return ModelStatistics(
        sizes=_by_number(each.sizes for each in counted),
        joined=_sum([each.joined for each in counted]),
        joined_rows=sum(each.joined_rows for each in counted),
        buckets=[sum(column) for column in zip(*(each.buckets for each in counted), strict=True)],
        failures=failures,
        failed_ns=sum(each.failed_ns for each in counted),
        last=max(each.last for each in counted),
        responses=_by_number(each.responses for each in counted),
        firsts=[sum(column) for column in zip(*(each.firsts for each in counted), strict=True)],
        firsts_ns=sum(each.firsts_ns for each in counted),
    )


def _counted(own: LaneStatistics, lanes: Sequence[LaneStatistics]) -> LaneStatistics:
    """The same lane, with what these have counted together."""
    requests, nbytes, connections, bodies = map(sum, zip(*(each.limited for each in lanes), strict=True))
    return own._replace(
        rejected=sum(each.rejected for each in lanes),
        expired=sum(each.expired for each in lanes),
        invalid=sum(each.invalid for each in lanes),
        limited=(requests, nbytes, connections, bodies),
        unread=sum(each.unread for each in lanes),
    )


def _by_version(reports: Iterable[Report]) -> dict[Version, list[ModelStatistics]]:
    found: dict[Version, list[ModelStatistics]] = {}
    for report in reports:
        for each in report.served:
            found.setdefault((each.name, each.version), []).append(each.statistics)
    return found


def _by_number(tables: Iterable[dict[int, _N]]) -> dict[int, _N]:
    found: dict[int, list[_N]] = {}
    for table in tables:
        for number, each in table.items():
            found.setdefault(number, []).append(each)
    return {number: _sum(each) for number, each in found.items()}


def _sum(counted: Sequence[_N]) -> _N:
    kind = type(counted[0])
    return kind(*(sum(getattr(each, field.name) for each in counted) for field in fields(kind)))
