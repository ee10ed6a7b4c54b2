"""The device side of some tenants as the control plane sees it, and what starts and ends tenants.

A device side is in this process (`server.device.runtime.Runtime`) or in another one; the controller does not know which.
Every method belongs to the controller's event loop. Errors are those of `server.errors` and `partitions`; Unavailable if the
process has ended.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from partitions.plan import Granules
from partitions.probe import Placement
from partitions.strain import Strain, Strained

from ..accounts.usage import Report
from ..config.schema import Config, ModelOptions
from ..tenants.frontend import ManagedFrontend
from .descriptions import Beside, DeviceInfo, Execution, Paused, ReadyShare, TenantMemory
from .fence import Fence
from .stretch import Wide
from .together import together


class Moves(Protocol):
    """Moves its tenants to other granules: `prepare`, `settle`, `halt` and `commit`, one move at a time.

    `discard` ends a move at any point before `commit` is done, and does nothing if there is none.
    """

    async def prepare(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int]]:
        """Make partitions of these granules for the tenants that are named, and make their models ready there.

        They are served on their old partitions meanwhile. Returns the units that a probe ran on, by tenant. Raises
        PartitionError, and Conflict naming a tenant whose models are being changed for longer than `server.max_pause`.
        """

    async def settle(self) -> None:
        """Wait until no tenant that was prepared has a long inference (10 ms); those that have one begin nothing more.

        All others are served, also those that `halt` has paused. Raises Conflict, naming a tenant, if that takes longer than
        `server.max_pause`, counted from the first call.
        """

    async def halt(self) -> bool:
        """Pause the tenants that were prepared once their work in flight has ended, after `settle`.

        False if one of them has a long inference all the same: then `settle` and `halt` again.
        """

    async def commit(self) -> dict[str, Paused]:
        """Serve the tenants that are paused from their new partitions, and close the old ones.

        Returns how long each was paused, where that is known.
        """

    async def switch(self) -> dict[str, Paused]:
        """`settle`, `halt` and `commit` at once, for a move that no other runtime takes part in: two messages fewer.

        Raises Conflict as `settle` does; after any other error the tenants have their old partitions too, if only in a process
        that replaces the one that failed.
        """

    async def discard(self) -> None:
        """Serve them from their old partitions, and close the new ones."""


class Placements(Protocol):
    """What its tenants have beside their homes: wide and narrow placements, and those ready for a move."""

    async def narrow(self, tenants: Collection[str]) -> None:
        """Have these tenants keep off their wide partitions until `plan`, and return when they do; they are served on.

        Raises Conflict, naming a tenant whose work takes longer than `server.max_pause`.
        """

    async def plan(self, wide: Mapping[str, Wide], fences: Mapping[str, Fence]) -> None:
        """Give its tenants these wide partitions, and hold them to these shares of bandwidth; all others have none.

        What is as planned already is used again; the rest is made in the background, or left out and logged if it cannot be.
        """

    async def hold(self, ready: Mapping[str, Sequence[Granules]]) -> dict[str, list[ReadyShare]]:
        """Have models of its tenants ready on these granules too; all others have none. Returns, once they are, what there is.

        A move of a tenant to one of them only has to switch. One that cannot be made is left out, and logged.
        """

    async def moved(self, figures: Mapping[str, Mapping[str, int]]) -> None:
        """What a work of each model (`name/version`) of fenced tenants moves in bytes of memory, as far as that is known now;
        below 0, and at most -1, for a model that is held whatever it moves, as it slows others or is tried for that.

        Said again every few seconds, so that a process that replaces another knows it as well.
        """

    async def states(self) -> dict[str, Beside]:
        """What there is, by tenant."""


class Models(Protocol):
    """The models of its tenants."""

    async def load(self, tenant: str, name: str, override: str | None = None) -> None:
        """Load or reload a model for one tenant; see `server.device.models`."""

    async def unload(self, tenant: str, name: str) -> None:
        """Stop serving a model to one tenant; see `server.device.models`."""

    async def refresh(self, tenant: str, name: str) -> str:
        """Serve a model as the repository has it now: a new one, other versions, other settings, or not at all any more.

        What is served of it goes on until that is ready, and stays if it cannot be served. Returns why it cannot, or why not
        all of it, as the index says too; "" otherwise. A model that the tenant has unloaded or may not call is left as it is.
        """

    async def prepare(
        self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = MappingProxyType({})
    ) -> list[str]:
        """Load what these tenants may call by these lists and not by those that they have, and what has other `options`, which
        are tables [models.NAME]; nothing of it is served yet.

        Returns why models cannot be served; none are changed then. `use` or `discard` follows.
        """

    async def use(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = MappingProxyType({})) -> None:
        """Serve the models of these lists with these options: what was prepared is added, and the rest of what was served goes.

        Returns when all requests for that have ended. If its process has ended, the next one starts with these lists, and with
        the options of the configuration.
        """

    async def discard(self) -> None:
        """Free what was prepared. Does nothing if nothing was."""

    async def executions(self) -> list[Execution]:
        """How each model runs now; see `engines.Executor.describe`."""

    async def memory(self) -> list[TenantMemory]:
        """What each tenant's models take of the device's memory now."""


class DeviceRuntime(Protocol):
    """Has partitions, workers and models of its tenants."""

    @property
    def away(self) -> bool:
        """Whether its process has ended and does not serve again yet."""

    @property
    def processes(self) -> int:
        """How many processes it has had so far: what was seen of a partition is true of that process alone."""

    @property
    def moves(self) -> Moves: ...
    @property
    def placements(self) -> Placements: ...
    @property
    def models(self) -> Models: ...

    async def open(self) -> DeviceInfo:
        """What the device is. Called first. Raises DeviceUnavailable; PartitionError if its process ends meanwhile."""

    async def start(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int] | None]:
        """Give every tenant its first partition, page-lock the tenants' memory, and start to load their models.

        Returns the host's cores that each partition reserves, None where it reserves none. Raises PartitionError or
        ConfigError.
        """

    async def loaded(self) -> None:
        """Wait until every configured model was tried."""

    async def usage(self) -> Report | None:
        """What its tenants' works have used since its process began; None if it does not answer within about a second."""

    async def probe(self, seconds: float) -> dict[str, Placement]:
        """Run a small amount of work in each partition; the units on which it ran, by tenant.

        On a shared device the work takes all units for so many seconds, and the answer is when it had them. While a move is
        prepared, a tenant that moves is represented by its new partition. Raises Conflict, naming the tenant, if an inference
        keeps its partition from that for longer than `server.max_pause`.
        """

    async def strain(self, tenant: str, kind: Strain, seconds: float) -> Strained:
        """Move bytes by this tenant's partition for so long; see `Partition.strain`. It goes on if the caller does not wait.

        Raises as that does, and Conflict if it cannot begin within `server.max_pause`.
        """

    def stop_loading(self) -> None:
        """The server drains: load no more models, and abandon builds."""

    def abandon(self, reason: str) -> None:
        """Cancel every inference in flight and queued; their requests fail with this reason."""

    async def close(self) -> None:
        """Wait for work in flight, and release the device. Idempotent."""


async def halt_all(moves: Sequence[Moves]) -> None:
    """Pause the tenants of these moves, which are prepared, all at once; none waits for a long inference of another meanwhile.

    Raises Conflict, naming a tenant whose work takes longer than `server.max_pause`.
    """
    while True:
        await together(each.settle() for each in moves)
        if all(await together(each.halt() for each in moves)):
            return


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
