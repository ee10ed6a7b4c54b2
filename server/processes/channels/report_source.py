"""Reports of processes as the supervisor gets them: the last one of an HTTP process that does not answer."""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from ...errors import Unavailable
from ...scheduling.lane_statistics import LaneStatistics, SlotStatistics
from ...tenants.frontend import Report
from .calls import proxy
from .http_protocols import ToTenant
from .rpc import Channel

_T = TypeVar("_T")
REPORT_TIMEOUT = 1.0
"""Seconds to wait for a report, which is asked of every tenant's process."""
_NO_REPORT = Report((), (), LaneStatistics(0, 0, 0, 0), SlotStatistics(0, 0, 0))


class ReportSource:
    """Belongs to the event loop. `last` is the last report."""

    def __init__(self) -> None:
        self.last = _NO_REPORT
        self._at = time.monotonic()

    def __repr__(self) -> str:
        return f"<ReportSource, {self.last}>"

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
