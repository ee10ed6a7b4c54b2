"""Placements of tenants whose device side is in another process; see `server.control.device_runtime.Placements`."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from partitions.plan import Granules

from ...control.descriptions import ReadyState
from ...control.device_runtime import Placements
from ...control.stretch import Wide, WideState
from ...errors import Unavailable
from ..channels.calls import proxy
from .device_calls import DeviceCalls
from .device_reports import DeviceReports
from .kept_state import KeptState


class RemotePlacements:
    """Belongs to the supervisor's event loop. What is planned is kept for a process that replaces this one."""

    def __init__(self, calls: DeviceCalls, kept: KeptState, reports: DeviceReports) -> None:
        self._calls = calls
        self._process = proxy(Placements, calls)
        self._kept = kept
        self._reports = reports

    def __repr__(self) -> str:
        return f"<RemotePlacements of {self._calls.label}>"

    async def narrow(self, tenants: Collection[str]) -> None:
        self._kept.on_narrowed(tenants)
        with suppress(Unavailable):  # A process that has ended uses nothing.
            await self._process.narrow(tenants)

    async def stretch(self, plans: Mapping[str, Wide]) -> None:
        self._kept.plans = dict(plans)
        await self._process.stretch(plans)

    async def hold(self, ready: Mapping[str, Sequence[Granules]]) -> list[ReadyState]:
        self._kept.ready = {name: list(each) for name, each in ready.items()}
        return await self._process.hold(ready)

    async def stretches(self) -> list[WideState]:
        return await self._reports.stretches()
