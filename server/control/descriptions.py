"""Devices, partitions and models as the control plane knows them: plain values, which may come from another process."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from partitions.base import Bandwidth
from partitions.health import cores_of, spelled
from partitions.plan import Granules

from ..accounts.usage import Count, Name
from ..facts import Fact
from .fence import FencedTenant
from .stretch import WidePartition


class DeviceInfo(NamedTuple):
    """A device: `granules` are their sizes in `unit`s, by index; see `partitions.base.Device`, for `address` as well."""

    kind: str
    description: str
    unit: str
    granules: tuple[int, ...]
    address: str = ""
    shared: bool = False
    """Whether several processes have partitions of it, so that only all of them together can show that these are apart."""
    bandwidth: Bandwidth | None = None


NOT_OPENED = DeviceInfo("", "not opened yet", "", ())
"""A device of which nothing is known yet."""


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A tenant's partition: its granules, and their size in units together."""

    granules: Granules
    size: int


class Execution(NamedTuple):
    """A version of a tenant's model, and its executor's description."""

    tenant: str
    name: str
    version: str
    description: Mapping[str, Any]


class Paused(Fact):
    """What a move cost one of the tenants that moved."""

    ms: Annotated[float, "Milliseconds for which it took no new inferences; its requests waited."]
    ladder: Annotated[bool, "Whether its models were ready on its ladder, so that it only had to switch."]


class ModelMemory(Fact, rename={"memory": "bytes"}):
    """A version of a model and what it takes of the device's memory."""

    name: str
    version: str
    paged: Annotated[bool, "Paged out: it takes nothing now; `bytes` is what it took before."]
    memory: Annotated[
        dict[str, int],
        "By kind. On a GPU: weights, contexts (activations), buffers (inputs and outputs), kernels and graphs; "
        "on a CPU: the copy of the file, and the session with its arena.",
        Meta(examples=[{"weights": 102400, "contexts": 4096, "buffers": 1204}]),
    ]

    @property
    def nbytes(self) -> int:
        """What it takes now."""
        return 0 if self.paged else sum(self.memory.values())


class TenantMemory(Fact, rename={"tenant": "name", "limit": "device_memory"}):
    """A tenant's budget of the device's memory and what it has. A model that other tenants use too counts in full."""

    tenant: str
    limit: Annotated[int | None, "The budget in bytes; null without one."]
    used: Annotated[int, "Bytes."]
    page_ins: Annotated[int, "How often models were brought back."]
    page_outs: Annotated[int, "How often models were paged out."]
    page_in_seconds: Annotated[float, "The time that took in all."]
    page_out_seconds: Annotated[float, "The time that took in all."]
    models: list[ModelMemory]


class ReadyShare(Fact):
    """A share on which the tenant's models are ready beside its own."""

    granules: Annotated[Granules, "Indices of granules."]
    models: Annotated[int, "How many are ready there: fewer than it has while they are made, or where they gave way."]
    bytes: Annotated[int, "Memory that they add: of the device, on cores of the host."]


class Beside(NamedTuple):
    """What a tenant has beside its home, planned or made."""

    wide: WidePartition | None
    fence: FencedTenant | None
    ready: list[ReadyShare]
    """For a move, also what it has left and is not closed yet."""


def shares(info: DeviceInfo, held: Mapping[str, PartitionInfo]) -> str:
    """Which tenant has which granules of this device, for the log: on a CPU which cores."""
    return ", ".join(f"{name} has {_share(info, partition)}" for name, partition in held.items())


def _share(info: DeviceInfo, partition: PartitionInfo) -> str:
    where = spelled(partition.granules, info.address)
    return where if cores_of(info.address) else f"{partition.size} ({where})"


class Loading(NamedTuple):
    """The model of a tenant that is being loaded, "" for none, and what is done with it: a phrase that its name completes.

    `ready`, `failed` and `known` are numbers of the tenant's models. `apart`: other processes do it, so that one of these ends
    where the model ends it.
    """

    tenant: str
    model: Name
    doing: Name = ""
    ready: Count = 0
    failed: Count = 0
    known: Count = 0
    apart: bool = False


CRASHED = "its process ended each time it was loaded; load it again when its file is another"
"""The reason of a model that is left out, as it ended processes before."""


class AtStart(NamedTuple):
    """How models are loaded at the start of a process that replaces another, so that its tenants are served as by that one.

    By tenant and name, the configurations that models were loaded with on request, and why others are not loaded. By tenant,
    and name, `ranks` are the order in which they are loaded, 0 where there is none. `again`: there was such a process.
    """

    overrides: Mapping[tuple[str, str], str | None] = MappingProxyType({})
    left_out: Mapping[tuple[str, str], str] = MappingProxyType({})
    ranks: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    again: bool = False


AS_CONFIGURED = AtStart()
