"""What one device process reports of itself, as the supervisor gets it: the last report where it does not answer."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from ...accounts.usage import Report
from ...control.descriptions import Execution, TenantMemory
from ...control.device_runtime import Models, Widths
from ...control.stretch import WideState
from ...errors import Unavailable
from ..channels.calls import Caller, proxy
from ..channels.device_protocols import ToRuntime
from ..channels.report_source import REPORT_TIMEOUT

_T = TypeVar("_T")


class DeviceReports:
    """Belongs to the event loop. `caller` calls the process.

    Each report is the last one that is known if the process does not answer within `REPORT_TIMEOUT`.
    """

    def __init__(self, caller: Caller) -> None:
        self._models, self._widths, self._runtime = proxy(Models, caller), proxy(Widths, caller), proxy(ToRuntime, caller)
        self._executions: list[Execution] = []
        self._memory: list[TenantMemory] = []
        self._stretches: list[WideState] = []

    def __repr__(self) -> str:
        return f"<DeviceReports, {len(self._executions)} executions>"

    async def executions(self) -> list[Execution]:
        if (found := await _in_time(self._models.executions())) is not None:
            self._executions = found
        return self._executions

    async def memory(self) -> list[TenantMemory]:
        if (found := await _in_time(self._models.memory())) is not None:
            self._memory = found
        return self._memory

    async def stretches(self) -> list[WideState]:
        if (found := await _in_time(self._widths.stretches())) is not None:
            self._stretches = found
        return self._stretches

    async def usage(self) -> Report | None:
        """None if the process does not answer: what was used is not reported twice."""
        return await _in_time(self._runtime.usage())


async def _in_time(call: Awaitable[_T]) -> _T | None:
    """The answer, None if there is none in time."""
    with suppress(Unavailable, TimeoutError):
        async with asyncio.timeout(REPORT_TIMEOUT):
            return await call
    return None
