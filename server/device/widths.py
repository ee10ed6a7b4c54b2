"""What tenants of this process have beside their own partitions; see `server.control.device_runtime.Widths`."""

from collections.abc import Collection, Mapping, Sequence

from partitions.plan import Granules

from ..control.descriptions import RungState
from ..control.stretch import Wide, WideState
from .ladders import Ladders
from .stretches import Stretches


class TenantWidths:
    """Wide partitions are those of `stretches`, rungs those of `ladders`. Belongs to the event loop."""

    def __init__(self, stretches: Stretches, ladders: Ladders) -> None:
        self._stretches = stretches
        self._ladders = ladders

    def __repr__(self) -> str:
        return f"<TenantWidths {self._stretches!r}, {self._ladders!r}>"

    async def narrow(self, tenants: Collection[str]) -> None:
        await self._stretches.narrow(tenants)

    async def stretch(self, plans: Mapping[str, Wide]) -> None:
        await self._stretches.stretch(plans)

    async def hold(self, rungs: Mapping[str, Sequence[Granules]]) -> list[RungState]:
        self._ladders.hold(rungs)
        await self._ladders.settled()
        return self._ladders.states()

    async def stretches(self) -> list[WideState]:
        return self._stretches.states()
