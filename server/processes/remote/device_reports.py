"""What one device process reports of itself, as the supervisor gets it: the last report where it does not answer."""

from ...accounts.usage import Report
from ...control.descriptions import Execution, TenantMemory
from ...control.device_runtime import Models, Placements
from ...control.stretch import WideState
from ..channels.calls import Caller, proxy
from ..channels.device_protocols import ToRuntime
from ..channels.report_source import in_time


class DeviceReports:
    """Belongs to the event loop. `caller` calls the process.

    Each report is the last one that is known if the process does not answer in time.
    """

    def __init__(self, caller: Caller) -> None:
        self._models, self._placements = proxy(Models, caller), proxy(Placements, caller)
        self._runtime = proxy(ToRuntime, caller)
        self._executions: list[Execution] = []
        self._memory: list[TenantMemory] = []
        self._stretches: list[WideState] = []

    def __repr__(self) -> str:
        return f"<DeviceReports, {len(self._executions)} executions>"

    async def executions(self) -> list[Execution]:
        if (found := await in_time(self._models.executions())) is not None:
            self._executions = found
        return self._executions

    async def memory(self) -> list[TenantMemory]:
        if (found := await in_time(self._models.memory())) is not None:
            self._memory = found
        return self._memory

    async def stretches(self) -> list[WideState]:
        if (found := await in_time(self._placements.stretches())) is not None:
            self._stretches = found
        return self._stretches

    async def usage(self) -> Report | None:
        """None if the process does not answer: what was used is not reported twice."""
        return await in_time(self._runtime.usage())
