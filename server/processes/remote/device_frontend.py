"""A tenant's HTTP process as the supervisor sees it for one device."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from ...link.ring import Descriptors
from ...tenants.catalog import ModelVersion
from ...tenants.frontend import HttpSide


class DeviceFrontend(HttpSide, Protocol):
    """What the supervisor does with it for the process that has this device, whose messages it passes on.

    It is the tenant's `RemoteFrontend`; of a tenant on several devices it is the `MemberFrontend` of this one, so `suspend` and
    `fail_in_flight` concern what this device runs.
    """

    descriptors: Descriptors

    def served(self) -> list[ModelVersion]:
        """The models that this device has published last."""

    def last_uses_known(self) -> Mapping[str, int]:
        """When each model was last used, as far as the supervisor knows without asking, on any clock; 0 for never."""

    def loading(self, name: str) -> AbstractContextManager[None]:
        """Within the block this device loads a model on request: each device of the tenant has it then, or none."""

    def fail_in_flight(self, reason: str, queued: bool = True) -> None:
        """As `ManagedFrontend.fail_in_flight`; with `queued` no model is served any more that is not published again."""

    async def relink(self, limit: float = math.inf) -> Callable[[], None]:
        """As `ManagedFrontend.relink`."""
