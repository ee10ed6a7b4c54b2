"""The HTTP processes of one tenant that serve now: the lead, at its link's other end, its helpers, if it has several, and what
all of them report together.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from ...errors import Unavailable
from ...scheduling.lane_statistics import LaneStatistics, SlotStatistics
from ...tenants.frontend import ModelReport, Report
from ...tenants.statistics import ModelStatistics, Responses, Size
from ..channels.calls import proxy
from ..channels.descriptors import DescriptorSender
from ..channels.http_protocols import ToHttpProcess, ToTenant
from ..channels.rpc import Channel

_T = TypeVar("_T")

REPORT_TIMEOUT = 1.0
"""Seconds to wait for a report, which is asked of every tenant's process."""
_NO_REPORT = Report((), (), LaneStatistics(0, 0, 0, 0), SlotStatistics(0, 0, 0))


class ReportSource:
    """Reports of one HTTP process: `last` where it does not answer. Belongs to the event loop."""

    def __init__(self) -> None:
        self.last = _NO_REPORT
        self._at = time.monotonic()

    async def ask(self, channel: Channel | None) -> Report:
        """The process's report; the last one if it hangs, is busy, or is being replaced (None)."""
        found = await in_time(proxy(ToTenant, channel).report()) if channel else None
        now = time.monotonic()
        if found is None:
            return replace(self.last, age=now - self._at)
        self.last, self._at = replace(found, age=0.0), now  # It is not the process that says how old it is.
        return self.last


async def in_time(call: Awaitable[_T]) -> _T | None:
    """The answer, None if there is none within `REPORT_TIMEOUT`."""
    with suppress(Unavailable, TimeoutError):
        async with asyncio.timeout(REPORT_TIMEOUT):
            return await call
    return None


class HttpProcesses:
    """Belongs to the supervisor's event loop. `lead` and `sender` are None while there is no lead; then nothing is sent."""

    def __init__(self) -> None:
        self.lead: Channel | None = None
        self.sender: DescriptorSender | None = None
        self.connected = asyncio.Event()
        """Set while there is a lead."""
        self._reports = ReportSource()
        self._helpers: dict[int, tuple[Channel, ReportSource]] = {}
        self._ended_helpers: list[Report] = []

    @property
    def channels(self) -> list[Channel]:
        """Those to all of them, the lead's first."""
        return [*([self.lead] if self.lead else []), *(channel for channel, _ in self._helpers.values())]

    def connect(self, channel: Channel, descriptors: DescriptorSender) -> None:
        """The lead is this process from now on."""
        self.lead, self.sender = channel, descriptors
        self.connected.set()

    def add_helper(self, number: int, channel: Channel) -> None:
        """The helper of this number is this process from now on."""
        self._helpers[number] = channel, ReportSource()

    def remove_helper(self, number: int) -> None:
        """It has ended. What it counted stays in the reports."""
        if found := self._helpers.pop(number, None):
            known = {(each.name, each.version) for each in self._reports.last.served}  # A process may report any.
            self._ended_helpers = [ended([*self._ended_helpers, found[1].last], known)]

    def forget(self) -> None:
        """The lead has ended, and its helpers with it; counting begins at zero."""
        self.lead = self.sender = None
        self._helpers, self._ended_helpers = {}, []
        self.connected.clear()

    def last_uses(self) -> dict[str, int]:
        """When each model was last used, as far as the last reports say, on the clock of `time.monotonic_ns`."""
        found: dict[str, int] = {}
        for source in (self._reports, *(source for _, source in self._helpers.values())):
            for each in source.last.served:
                found[each.name] = max(each.statistics.last, found.get(each.name, 0))
        return found

    @property
    def all(self) -> list[ToHttpProcess]:
        """All of them, the lead first."""
        return [proxy(ToHttpProcess, channel) for channel in self.channels]

    async def each(self, call: Callable[[ToHttpProcess], Awaitable[_T]]) -> list[_T | None]:
        """What this call of every process returns, the lead's first; None of one that dies before it answers."""
        return await asyncio.gather(*(_answer(call(process)) for process in self.all))

    async def report(self) -> Report:
        """What all of them have counted; of one that does not answer, what it last reported."""
        helpers = [source.ask(channel) for channel, source in self._helpers.values()]
        lead, *others = await asyncio.gather(self._reports.ask(self.lead), *helpers)
        others += self._ended_helpers
        return total(lead, others) if others else lead


async def _answer(call: Awaitable[_T]) -> _T | None:
    """The answer to a call; None if the process dies before it answers."""
    with suppress(Unavailable):
        return await call
    return None


_N = TypeVar("_N", Size, Responses)
Version = tuple[str, str]
"""A model's name and version."""


def total(lead: Report, helpers: Sequence[Report]) -> Report:
    """The report of all these processes together, as old as the oldest of them. Pure.

    The lead's lane has the requests of all of them, and counts what it refuses and the batches that run; each process counts
    the requests of its own connections.
    """
    helped = _by_version(helpers)
    served = []
    for each in lead.served:
        found = [each.statistics, *helped.get((each.name, each.version), ())]
        statistics = added(found)
        statistics.runs, statistics.last_run = each.statistics.runs, each.statistics.last_run
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
    return kind(*(sum(getattr(each, name) for each in counted) for name in kind.__struct_fields__))
