"""What a process with the device side of some tenants and the supervisor call in each other, by `calls`.

The supervisor also calls `Moves`, `Placements` and `Models` of `server.control.device_runtime`, which describes most of this.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from partitions.plan import Granules
from partitions.probe import Placement
from partitions.strain import Strain, Strained

from ...accounts.usage import Count, Report
from ...config.tenant import TenantConfig
from ...control.descriptions import AtStart, DeviceInfo, Loading
from ...tenants.frontend import State
from .descriptors import SentLink


class Change(NamedTuple):
    """A model of a tenant that was loaded on request, with this configuration if there is one, or unloaded."""

    tenant: str
    name: str
    loaded: bool
    override: str | None = None


class ToRuntime(Protocol):
    """Any process with a device side; see `DeviceRuntime`."""

    async def open(self) -> DeviceInfo: ...
    async def start(
        self, granules: Mapping[str, Granules], models: Mapping[str, Sequence[str]], at_start: AtStart
    ) -> dict[str, frozenset[int] | None]:
        """`models` are lists of tenants that differ from those of the configuration."""

    async def loaded(self) -> None: ...
    async def usage(self) -> Report: ...
    async def probe(self, seconds: float) -> dict[str, Placement]: ...
    async def strain(self, tenant: str, kind: Strain, seconds: float) -> Strained: ...
    def stop_loading(self) -> None: ...
    def abandon(self, reason: str) -> None: ...
    async def close(self) -> None:
        """Finish work in flight and release the device; a device process exits after its answer."""


class ToDeviceProcess(Protocol):
    """A device process, whose tenants' links come from the supervisor."""

    async def replace_link(self, tenant: str, link: SentLink) -> None:
        """The tenant's HTTP process was replaced: serve the new link. Returns when the old one is not used any more."""

    async def adopt(
        self,
        tenant: str,
        link: SentLink,
        granules: Granules,
        changes: Sequence[Change],
        beyond: Count,
        models: Sequence[str] | None,
        config: TenantConfig,
    ) -> None:
        """Make a tenant of another device ready on these granules, beside those of this one, and then make these changes.

        Its link is one to its memory that is not in use yet. The models' keys have numbers above `beyond`. `models` is its
        list, if that is not the one of the configuration any more. What it publishes meanwhile the supervisor keeps.
        """

    async def name_models(self, tenant: str, keys: Mapping[str, str]) -> None:
        """Requests of a tenant that was adopted name its models by these keys too, each with the key of the model here."""

    async def forget_keys(self, tenant: str, keys: Sequence[str]) -> None:
        """No request of the tenant names a model by these keys any more."""

    async def release(self, tenant: str) -> None:
        """Stop serving a tenant, and free its models, partition and memory. Returns when that is done."""

    async def set_pages(self, tenants: Sequence[str], pages: Count | None) -> None:
        """Tenants of any process have activity pages, whose descriptors were sent by this number; None: they have gone.

        A call, as all others with descriptors are: a notification would be handled before calls that came earlier.
        """

    def cancel(self, tenant: str, slot: Count, serial: Count) -> None:
        """Stop a ticket of a tenant, if it can be stopped."""

    def set_affinity(self, cores: frozenset[int], builds: frozenset[int], starting: frozenset[int]) -> None:
        """Run on these of the host's cores, and builds of models on those, or on the last ones while the process starts."""


class FromRuntime(Protocol):
    """The supervisor, for a process with a device side."""

    def on_state(self, state: State) -> None:
        """The state of this device side."""

    def on_loading(self, loading: Loading) -> None:
        """What is loaded from now on."""

    def on_lost(self, reason: str) -> None:
        """The device is lost, and the process will exit."""

    def on_stuck(self, reason: str) -> None:
        """The only tenant of this process has an inference that cannot be stopped: end the process, and start another."""
