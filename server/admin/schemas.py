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


class NamedDevice(Schema):
    """One of the devices, its granules and its tenants."""

    name: str = Field(description='As in the configuration; "0" for a device without a name.', examples=["0"])
    kind: str = Field(examples=["cpu"])
    description: str
    unit: Unit
    granules: list[Granule]
    tenants: list[str] = Field(description="Those that are on it now.")
    state: Literal["starting", "serving", "incomplete", "draining", "lost", "closed", "restarting"] = Field(
        description="`incomplete`: a model failed to load; `restarting`: its process has ended, and is started again."
    )


class Device(Schema):
    """The devices that the tenants share. Fields of a single one are here as well, and absent where there are several."""

    kind: str = Field(default="", examples=["cpu"])
    description: str = ""
    unit: Unit = ""
    granules: list[Granule] = Field(default_factory=list)
    devices: list[NamedDevice]


class Partition(Schema):
    """A tenant's share of its device."""

    granules: Granules
    size: int = Field(description="In units.")
    device: str = Field(description="The device's name.")


class DeviceGranules(Schema):
    """One of the devices, and how much of it is free."""

    name: str
    unit: Unit
    granules: int = Field(description="How many there are.")
    free: int = Field(description="How many no tenant has.")


class Partitions(Schema):
    """Which tenant has which granules. Fields of a single device are here as well, and absent where there are several."""

    unit: Unit = ""
    granules: int = Field(default=0, description="How many there are.")
    free: int = Field(default=0, description="How many no tenant has.")
    devices: list[DeviceGranules]
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
    """The partitions, and where work in each of them ran. Units are numbered by each device for itself."""

    unit: Unit = ""
    granules: int = 0
    free: int = 0
    devices: list[DeviceGranules]
    partitions: dict[str, LocatedPartition] = Field(description="By tenant.")
    overlaps: list[Overlap] = Field(description="Empty where isolation holds.")


class Counts(RootModel[dict[str, Annotated[int, Field(ge=1)]]]):
    """Granules by tenant; tenants that are not named keep theirs."""


class Transfer(Schema):
    """Where a tenant moves to."""

    device: str = Field(description="The device's name.")
    granules: int = Field(default=0, ge=1, description="Its share there; without it as many granules as it has.")


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
