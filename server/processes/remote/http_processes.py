"""The HTTP processes of one tenant that serve now: the lead, at its link's other end, and its helpers, if it has several."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from ...errors import Unavailable
from ...scheduling.lane_statistics import LaneStatistics, SlotStatistics
from ...tenants.frontend import Report
from ...tenants.totals import ended, total
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
        self.last, self._at = found.report(), now
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
