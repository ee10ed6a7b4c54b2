"""Requests and answers of the administrators' API, which /admin/openapi.json shows; see `server.api.schemas`."""

from typing import Annotated, Literal

from pydantic import Field, RootModel

from ..api.schemas import RepositoryEntry, Schema

Unit = Annotated[str, Field(description="What a granule is made of: cores of a CPU, SMs of a GPU.", examples=["core"])]
Granules = Annotated[list[int], Field(description="Indices of granules.")]


class Granule(Schema):
    """The smallest share of the device that can be given to a tenant."""

    index: int
    size: int = Field(description="In units.")


class Device(Schema):
    """The device that all tenants share."""

    kind: str = Field(examples=["cpu"])
    description: str
    unit: Unit
    granules: list[Granule]


class Partition(Schema):
    """A tenant's share of the device."""

    granules: Granules
    size: int = Field(description="In units.")


class Partitions(Schema):
    """Which tenant has which granules."""

    unit: Unit
    granules: int = Field(description="How many there are.")
    free: int = Field(description="How many no tenant has.")
    partitions: dict[str, Partition] = Field(description="By tenant.")


class Moved(Partitions):
    """The partitions after a repartition."""

    moved: list[str] = Field(description="Tenants whose share has changed.")


class LocatedPartition(Partition):
    """A tenant's share, and where its work ran."""

    located: list[int] = Field(description="Numbers of the units on which the probe's work ran.")


class Overlap(Schema):
    """Two tenants whose work ran on the same units."""

    tenants: list[str]
    units: list[int]


class Probed(Schema):
    """The partitions, and where work in each of them ran."""

    unit: Unit
    granules: int
    free: int
    partitions: dict[str, LocatedPartition] = Field(description="By tenant.")
    overlaps: list[Overlap] = Field(description="Empty where isolation holds.")


class Counts(RootModel[dict[str, Annotated[int, Field(ge=1)]]]):
    """Granules by tenant; tenants that are not named keep theirs."""


class Tenant(Schema):
    """A tenant: its limits, its models, and its requests."""

    name: str
    queue: int = Field(description="How many requests may wait.")
    credits: int = Field(description="How many inferences may be in flight (`in_flight`).")
    models: list[RepositoryEntry]
    waiting: int = Field(description="Requests that wait.")
    in_flight: int = Field(description="Inferences in flight.")
    abandoned: int = Field(description="Inferences in flight whose clients have disconnected.")
    rejected: int = Field(description="Requests refused so far because the queue or the memory was full.")
    expired: int = Field(description="Requests so far whose timeout passed.")
    invalid: int = Field(description="Requests refused so far because they were wrong.")
    age_seconds: float = Field(description="How old these numbers are: above 0 while the tenant's process does not answer.")


class Tenants(Schema):
    """All tenants."""

    tenants: list[Tenant]


class Draining(Schema):
    """The server drains."""

    state: Literal["draining"]
