"""The messages between the supervisor and a process that has the device side of some tenants; `rpc` carries them.

`server.control.device_runtime` says what most of them are for.
"""

from typing import Any

import msgspec

from ...accounts.usage import Count
from ...control.descriptions import Loading
from ...control.stretch import Wide
from ...tenants.catalog import IndexEntry
from ...tenants.frontend import State
from .message_fields import ServedModelFields
from .messages import Message

# From the supervisor. All are calls, except `StopLoading`, `Abandon`, `CancelTenantTicket` and `SetDeviceAffinity`.


class OpenDevice(Message):
    """Open the device. Answered with a `DeviceInfo`."""


class StartTenants(Message):
    """Partition the device and load models, but not those that are left out, by tenant, because they ended processes before.

    `models` are the lists of tenants that are not those of the configuration any more, and `changes` what was loaded and
    unloaded on request. Models are loaded in the order of their `ranks`, 0 where there is none. Answered with the host's cores
    of each partition, by tenant.
    """

    granules: dict[str, tuple[int, ...]]
    left_out: dict[str, list[str]] = msgspec.field(default_factory=dict)
    models: dict[str, list[str]] = msgspec.field(default_factory=dict)
    changes: "list[LoadModel | UnloadModel]" = msgspec.field(default_factory=list)
    ranks: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)


class WaitUntilLoaded(Message):
    """Answered when every model was tried."""


class PrepareMove(Message):
    """Answered with the units that the probe ran on, by tenant."""

    granules: dict[str, tuple[int, ...]]


class SettleMove(Message):
    """Answered when none of the tenants of the move that was prepared has a long inference."""


class HaltMove(Message):
    """Pause the tenants of the move that was prepared. Answered with whether they are; else `SettleMove` again."""


class CommitMove(Message):
    """Serve the tenants that are paused from their new partitions. Answered with each one's `Pause`."""


class SwitchMove(Message):
    """`SettleMove`, `HaltMove` and `CommitMove` at once. Answered as `CommitMove` is."""


class DiscardMove(Message):
    """End the move without a change."""


class NarrowTenants(Message):
    """Have these tenants use their home partitions alone. Answered when they do."""

    tenants: list[str]


class StretchTenants(Message):
    """Give tenants these wide partitions, and all others none."""

    plans: dict[str, Wide]


class HoldRungs(Message):
    """Have models of tenants ready on these granules too. Answered when they are, with a list of `RungState`."""

    rungs: dict[str, list[tuple[int, ...]]]


class GetStretches(Message):
    """Answered with a list of `WideState`."""


class LoadModel(Message):
    """Load or reload a model of a tenant, with this configuration if it is not None."""

    tenant: str
    name: str
    override: str | None


class UnloadModel(Message):
    """Unload a model of a tenant."""

    tenant: str
    name: str


class RefreshModel(Message):
    """As `Models.refresh`. Answered with the reason."""

    tenant: str
    name: str


class PrepareModels(Message):
    """As `Models.prepare`; `options` are those of `config_fields.options_fields`. Answered with the problems."""

    lists: dict[str, list[str]]
    options: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)


class UseModels(Message):
    """As `Models.use`. Answered when that is done."""

    lists: dict[str, list[str]]
    options: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)


class DiscardModels(Message):
    """Free what was prepared."""


class GetExecutions(Message):
    """Answered with a list of `Execution`."""


class GetMemory(Message):
    """Answered with a list of `TenantMemory`."""


class GetUsage(Message):
    """Answered with a `server.accounts.usage.Report`."""


class ProbePartitions(Message):
    """Answered with a `Placement` by tenant; see `DeviceRuntime.probe`."""

    seconds: float


class ReplaceLink(Message):
    """The tenant's HTTP process was replaced: serve the new link, whose descriptors were sent by this number.

    Answered when the old one is not used any more.
    """

    tenant: str
    number: Count
    slots: Count
    nbytes: Count


class AdoptTenant(Message):
    """Make a tenant of another device ready on these granules, beside those of this one, and then make these changes.

    Its link is one to its memory that is not in use yet, whose descriptors were sent by this number. The models' keys have
    numbers above `beyond`. `models` is its list, if that is not the one of the configuration any more, and `config` is what
    `config_fields.fields_of` made of its configuration, if the process does not have that. Answered with what would be
    published, as a list of `PublishModel`.
    """

    tenant: str
    number: Count
    slots: Count
    nbytes: Count
    granules: tuple[int, ...]
    changes: list[LoadModel | UnloadModel]
    beyond: Count
    models: list[str] | None = None
    config: dict[str, Any] | None = None


class NameModels(Message):
    """Requests of a tenant that was adopted name its models by these keys too: each is followed by the key of the model here.

    From now on what is loaded for it is published.
    """

    tenant: str
    keys: dict[str, str]


class ForgetKeys(Message):
    """No request of the tenant names a model by these keys any more."""

    tenant: str
    keys: list[str]


class ReleaseTenant(Message):
    """Stop serving a tenant, and free its models, partition and memory. Answered when that is done."""

    tenant: str


class StopLoading(Message):
    """Load no more models."""


class Abandon(Message):
    """Cancel all inferences, for this reason."""

    reason: str


class CancelTenantTicket(Message):
    """Stop a ticket of a tenant, if it can be stopped."""

    tenant: str
    slot: Count
    serial: Count


class SetDeviceAffinity(Message):
    """Run on these of the host's cores, and builds of models on those, or on the last ones too while the process starts."""

    cores: frozenset[int]
    builds: frozenset[int]
    starting: frozenset[int]


class CloseDevice(Message):
    """Finish work in flight and release the device; the process exits after its answer."""


# To the supervisor. All are notifications, except `AgreeOnModel`, `PublishModel`, `GetTenantUses` and `PageOutModel`.


class DeviceState(Message):
    """The state of this device side."""

    state: State


class ReportDeviceLost(Message):
    """The device is lost, and the process will exit."""

    reason: str


class EndProcess(Message):
    """The only tenant of this process has an inference that cannot be stopped: end the process, and start another."""

    reason: str


class LoadingModel(Message):
    """What is loaded from now on."""

    loading: Loading


class AnnounceModel(Message):
    """A model of a tenant is being loaded."""

    tenant: str
    name: str


class ModelsListed(Message):
    """Every model that there is was announced to a tenant."""

    tenant: str


class AgreeOnModel(Message):
    """These versions of a tenant's model were loaded. Answered as `Frontend.agree`."""

    tenant: str
    name: str
    served: list[ServedModelFields]


class WithdrawModel(Message):
    """As `Frontend.withdraw`."""

    tenant: str
    name: str


class PublishModel(Message):
    """Serve these versions of a tenant's model. Answered with False if the tenant's HTTP process has died meanwhile."""

    tenant: str
    name: str
    served: list[ServedModelFields]
    problems: list[IndexEntry]


class GetTenantUses(Message):
    """As `GetLastUses`, of a tenant."""

    tenant: str


class PageOutModel(Message):
    """As `PageOut`, of a tenant."""

    tenant: str
    model: str


class PageInModel(Message):
    """As `PageIn`, of a tenant."""

    tenant: str
    model: str


class SetTenantCores(Message):
    """The host's cores of the tenant's partition; None on a GPU."""

    tenant: str
    cores: frozenset[int] | None


class SuspendTenant(Message):
    """Take none of the tenant's requests for now, and fail current ones; with an empty reason take them again."""

    tenant: str
    reason: str


class DistrustTenant(Message):
    """The tenant's HTTP process wrote to its link what it may not write."""

    tenant: str
    reason: str
