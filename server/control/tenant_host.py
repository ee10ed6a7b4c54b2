"""Starts and ends what a tenant has of its own, as the control plane sees it: its processes, memory and partition."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from partitions.plan import Granules

from ..config.schema import Config
from ..tenants.frontend import ManagedFrontend
from .device_runtime import DeviceRuntime


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tenant that is ready: its HTTP side, its device side, and the host's cores that its partition reserves by name."""

    frontend: ManagedFrontend
    runtime: DeviceRuntime
    host_cores: Mapping[str, frozenset[int] | None]


class TenantHost(Protocol):
    """Every method belongs to the controller's event loop.

    A tenant that comes: `prepare`, then `admit` or `discard`. One that goes: `leave`, and `end` when its requests are answered.
    """

    async def prepare(self, config: Config, name: str, device: str, granules: Granules) -> Arrival:
        """Make a tenant ready on these granules: partition, memory, processes and models. No client can reach it yet.

        Raises RequestError or PartitionError, Conflict with every model that cannot be loaded; nothing is left of it then.
        """

    async def discard(self, name: str) -> None:
        """Undo `prepare`."""

    async def admit(self, name: str) -> None:
        """Serve it. All processes know its keys now."""

    def leave(self, name: str) -> None:
        """Its keys are unknown now. Whatever of it ends from here on is not started again."""

    async def end(self, name: str) -> None:
        """End its processes, and free its partition and its memory."""
