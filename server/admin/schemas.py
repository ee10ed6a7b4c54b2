"""Answers of the administrators' API, and for /admin/openapi.json alone requests and answers whose fields may be missing."""

from typing import Annotated, Literal

from msgspec import Meta
from pydantic import Field, RootModel

from partitions.strain import MOST, Strain

from ..api.schemas import RepositoryEntry, Schema
from ..control.controller import DeviceState
from ..control.descriptions import ReadyShare, TenantMemory
from ..control.fence import FencedTenant
from ..control.moves import Move
from ..control.stretch import WidePartition
from ..facts import Fact
from ..observing.advice import Certainty, Verdict
from ..observing.pilot import Mode

Unit = Annotated[str, Field(description="What a granule is made of: cores of a CPU, SMs of a GPU.", examples=["core"])]
Granules = Annotated[list[int], Field(description="Indices of granules.")]


class Granule(Fact):
    """The smallest share of the device that can be given to a tenant."""

    index: int
    size: Annotated[int, "In units."]


class NamedDevice(Fact):
    """One of the devices, its granules and its tenants."""

    name: Annotated[str, 'As in the configuration; "0" for a device without a name.', Meta(examples=["0"])]
    kind: Annotated[str, Meta(examples=["cpu"])]
    description: str
    unit: Unit
    granules: list[Granule]
    tenants: Annotated[list[str], "Those that are on it now."]
    state: Annotated[
        DeviceState, "`incomplete`: a model failed to load; `restarting`: its process has ended, and is started again."
    ]


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
    fence: FencedTenant | None = Field(default=None, description="Absent without `memory_bandwidth` and `pcie`.")
    wide: WidePartition | None = Field(default=None, description="Absent without a `burst`, and where no tenant lends.")
    ladder: list[ReadyShare] = Field(default_factory=list, description="What is ready now. Absent where nothing is.")


class DeviceGranules(Fact):
    """One of the devices, and how much of it is free."""

    name: str
    unit: Unit
    granules: Annotated[int, "How many there are."]
    free: Annotated[int, "How many no tenant has."]


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

    located: list[int] | None = Field(
        description="Numbers of the units on which the probe's work ran; null under MPS, where SMs have no numbers: there the "
        "work takes all SMs of every partition at the same time, and tenants that could not have theirs are in `overlaps`."
    )


class Overlap(Fact):
    """Two tenants whose work ran on the same units."""

    tenants: list[str]
    units: Annotated[list[int], "Empty where units have no numbers."]


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


class Straining(Schema):
    """What a tenant's share does for how long."""

    kind: Strain
    seconds: float = Field(gt=0, le=MOST)


class Strained(Fact):
    """What that moved."""

    tenant: str
    kind: Strain
    bytes: Annotated[int, "Read and written ones."]
    seconds: float
    gigabytes_per_second: float


class Tenant(Fact):
    """A tenant: its limits, its models, and its requests."""

    name: str
    queue: Annotated[int, "How many requests may wait."]
    credits: Annotated[int, "How many inferences may be in flight (`in_flight`)."]
    models: list[RepositoryEntry]
    waiting: Annotated[int, "Requests that wait."]
    in_flight: Annotated[int, "Inferences in flight."]
    abandoned: Annotated[int, "Inferences in flight whose clients have disconnected."]
    rejected: Annotated[int, "Requests refused so far because the queue or the memory was full."]
    expired: Annotated[int, "Requests so far whose timeout passed."]
    invalid: Annotated[int, "Requests refused so far because they were wrong."]
    unread: Annotated[int, "Connections closed so far because their clients did not read their answers."]
    age_seconds: Annotated[float, "How old these numbers are: above 0 while the tenant's process does not answer."]


class Tenants(Fact):
    """All tenants."""

    tenants: list[Tenant]


class Memory(Fact):
    """All tenants."""

    tenants: list[TenantMemory]


class Moves(Fact):
    """The last moves of granules."""

    moves: Annotated[list[Move], "The newest first, 256 at most."]


class AutopilotMode(Schema):
    """Whether the autopilot moves granules (`on`), only says what it would move (`dry-run`), or does nothing (`off`)."""

    mode: Mode


class Measured(Fact):
    """A tenant's requests of the last seconds."""

    seconds: float
    requests: Annotated[int, "Requests answered."]
    busy: Annotated[float, "Share of the time in which its partition ran an inference, from 0 to 1."]
    queue_ms: Annotated[float, "Mean wait for the partition."]
    p99_ms: Annotated[float | None, "From the complete body to the encoded answer; null without a request."]
    turned_away: Annotated[int, "Requests refused for a full queue or memory, and those whose timeout passed."]


class Piloted(Fact):
    """A tenant as the autopilot sees it. Without `target_p99` and `min_granules` it changes nothing for the tenant."""

    granules: int
    own_granules: Annotated[int | None, "Its own by the configuration or an operator; null before it was first on."]
    min_granules: int | None
    target_ms: float | None
    measured: Annotated[Measured | None, "null while it is off, and for some seconds after each move."]


class Autopilot(Fact):
    """The autopilot: its mode, and what it sees."""

    mode: Mode
    paused_for_seconds: Annotated[float, "Nothing is moved for so long, because an operator moved granules."]
    notes: Annotated[list[str], "Why tenants that miss their targets get nothing."]
    tenants: dict[str, Piloted]


class MovedBytes(Fact):
    """Bytes that were moved."""

    memory: Annotated[int, "Of the device's own memory, read and written."]
    pcie_in: Annotated[int, "Over PCIe into the device."]
    pcie_out: Annotated[int, "Over PCIe out of it."]
    by: Annotated[
        Literal["measured", "estimated"],
        "Measured by the device and fitted to what ran, at least nine tenths of each; or shared by what models take and use.",
    ]


class UsedDevice(Fact):
    """A device over the time of the answer, in seconds of one unit."""

    name: str
    unit: Unit
    units: int
    total: Annotated[float, "All there was: units times time. Granted and free together."]
    granted: float
    free: float
    used: float
    idle: float
    lent: float
    borrowed: float
    energy_joules: Annotated[float | None, "Null where it cannot be read."]
    idle_energy_joules: Annotated[float | None, "What it takes when nothing runs; belongs to no tenant."]
    moved: Annotated[MovedBytes | None, "Null where it does not count that."]
    background: Annotated[MovedBytes | None, "What no tenant's model moved of that."]
    moved_seconds: Annotated[float, "It was counted for so long."]


class UsedModel(Fact):
    """A version of a tenant's model over the time of the answer, in seconds of one unit."""

    name: str
    version: str
    works: Annotated[int, "Runs, failed and stopped ones included."]
    used: Annotated[float, "On the tenant's own units."]
    borrowed: Annotated[float, "On units of other tenants."]
    energy_joules: Annotated[float | None, "By use, without the device's idle power."]
    moved: MovedBytes | None


class UsedTenant(Fact):
    """A tenant on a device over the time of the answer, in seconds of one unit."""

    tenant: str
    device: str
    unit: Unit
    share: Annotated[int, "Units that it has now; 0 if it has moved to another device."]
    granted: Annotated[float, "Its share over time: used, idle and lent together."]
    used: Annotated[float, "Its models ran on its own units."]
    idle: Annotated[float, "Nothing ran. Less than 0 while it and a borrower ran on the same units."]
    lent: Annotated[float, "Other tenants' models ran on its units."]
    borrowed: Annotated[float, "Its models ran on other tenants' units."]
    energy_joules: float | None
    moved: MovedBytes | None
    device_memory_bytes: Annotated[int, "What its models take of the device's memory now."]
    age_seconds: Annotated[float, "How old the last report of use is."]
    models: list[UsedModel]


class Usage(Fact):
    """What was granted and used."""

    since: Annotated[str, "RFC 3339; the time that was asked for, or the last before it that is known."]
    until: str
    seconds: float
    devices: list[UsedDevice]
    tenants: Annotated[list[UsedTenant], "A tenant that has moved is here once for each device."]


class Needed(Measured):
    """A tenant's requests while the advice was made."""

    p99_between_ms: Annotated[
        list[float | None] | None,
        "The p99 is between these for certain, as requests are counted by ranges of time; the second is null for "
        "one above 10 s.",
    ]


class Advice(Fact):
    """A tenant's share, what it needed, and what to do."""

    granules: int
    device: Annotated[str, "The device's name."]
    target_ms: Annotated[float | None, "Its `target_p99`."]
    verdict: Annotated[
        Verdict,
        "`fewer`: its target would be kept with `advised_granules`; `more`: it misses it; `unknown`: too few "
        "requests, or no `target_p99`.",
    ]
    advised_granules: Annotated[int | None, "null where that is unknown, or the whole device would hardly do."]
    certainty: Annotated[
        Certainty,
        "`high`: measured, or an estimate that is on the safe side, as it takes runs to be longer in proportion "
        "with fewer granules; `low`: the least that it takes by that estimate, or a p99 about at its target.",
    ]
    advice: Annotated[str, Meta(examples=["acme uses 12 % of 4 cores; its p99 is 3.1 ms, target 5 ms: 2 cores would do"])]
    measured: Annotated[Needed | None, "null where its share changed meanwhile, or its process does not answer."]
    lending: Annotated[
        list[str],
        "What lending did meanwhile, and what would let it do more; empty where there is nothing to say.",
        Meta(examples=[["120 of 300 inferences ran on granules that globex lends"]]),
    ]
    bandwidth: Annotated[
        list[str], "Memory bandwidth that it draws beside others, and what its own shares of that and of PCIe make too slow."
    ]


class Advices(Fact):
    """Advice for every tenant, by name."""

    seconds: Annotated[float, "How long was measured."]
    tenants: dict[str, Advice]


class ChangedModel(Fact):
    """A model that was loaded or unloaded."""

    tenant: str
    model: str


class Draining(Fact):
    """The server drains."""

    state: Literal["draining"]


class ChangedKey(Fact):
    """A key of the configuration's file with its values as text; of digests only the first digits."""

    key: Annotated[str, Meta(examples=["tenants.acme.requests_per_second"])]
    old: str
    new: str


class Reloaded(Fact):
    """What a reload has changed."""

    changed: list[ChangedKey]
