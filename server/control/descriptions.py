"""Devices, partitions and models as the control plane knows them: plain values, which may come from another process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partitions.plan import Granules


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device: `granules` are their sizes in `unit`s, by index; see `partitions.base.Device`."""

    kind: str
    description: str
    unit: str
    granules: tuple[int, ...]


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
    description: Mapping[str, object]


class Pause(NamedTuple):
    """How long a tenant that moved took no new inferences, and whether its models were ready on its ladder."""

    seconds: float
    ladder: bool = False


def shares(held: Mapping[str, PartitionInfo]) -> str:
    """Which tenant has which granules, for the log."""
    return ", ".join(f"{name} has {partition.size} ({_granules(partition.granules)})" for name, partition in held.items())


def _granules(granules: Sequence[int]) -> str:
    return f"granule{'s' * (len(granules) != 1)} {', '.join(map(str, granules))}"
