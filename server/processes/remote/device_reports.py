"""What one device process reports of itself, as the supervisor gets it: the last report where it does not answer."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ...accounts.usage import Report
from ...control.descriptions import Execution, TenantMemory
from ...control.stretch import WideState
from ...errors import Unavailable
from ..channels.device_messages import GetExecutions, GetMemory, GetStretches, GetUsage
from ..channels.messages import Message
from ..channels.report_source import REPORT_TIMEOUT


class DeviceReports:
    """Belongs to the event loop. `call` sends the process a message, and returns what it answers.

    Each report is the last one that is known if the process does not answer within `REPORT_TIMEOUT`.
    """

    def __init__(self, call: Callable[[Message, Any], Awaitable[Any]]) -> None:
        self._call = call
        self._executions: list[Execution] = []
        self._memory: list[TenantMemory] = []
        self._stretches: list[WideState] = []

    def __repr__(self) -> str:
        return f"<DeviceReports, {len(self._executions)} executions>"

    async def executions(self) -> list[Execution]:
        found: list[Execution] | None = await self._ask(GetExecutions(), list[Execution])
        if found is not None:
            self._executions = found
        return self._executions

    async def memory(self) -> list[TenantMemory]:
        found: list[TenantMemory] | None = await self._ask(GetMemory(), list[TenantMemory])
        if found is not None:
            self._memory = found
        return self._memory

    async def stretches(self) -> list[WideState]:
        found: list[WideState] | None = await self._ask(GetStretches(), list[WideState])
        if found is not None:
            self._stretches = found
        return self._stretches

    async def usage(self) -> Report | None:
        """None if the process does not answer: what was used is not reported twice."""
        found: Report | None = await self._ask(GetUsage(), Report)
        return found

    async def _ask(self, message: Message, result: Any) -> Any:
        """The answer, None if there is none in time."""
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT):
                return await self._call(message, result)
        return None
