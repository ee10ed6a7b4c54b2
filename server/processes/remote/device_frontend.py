"""A tenant's HTTP process as the supervisor sees it for one device."""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from ...link.messages import ModelKey
from ...link.ring import Descriptors
from ...tenants.catalog import IndexEntry, ModelVersion
from ...tenants.frontend import HttpSide


class Publication(NamedTuple):
    """The versions of a model that are served, and problems of others."""

    name: str
    served: list[ModelVersion]
    problems: list[IndexEntry]


class DeviceFrontend(HttpSide):
    """What the process that has this device calls, and what the supervisor does when that ends.

    It is the tenant's `RemoteFrontend`; of a tenant on several devices it is the `MemberFrontend` of this one, so `suspend` and
    `fail_in_flight` concern what this device runs.
    """

    descriptors: Descriptors
    allows: Callable[[str], bool] | None = None
    """Set while a process that replaces another loads its models: which of them the tenant may call now."""
    _ended = _suspended = ""

    @property
    def refusing(self) -> str:
        """Why no requests are taken now: the device side has ended, or has suspended the tenant; "" if they are taken."""
        return self._ended or self._suspended

    def suspend(self, reason: str) -> None:
        self._suspended = reason
        if not self._ended:
            self._refuse(reason)

    def change_device(self, paged: Collection[ModelKey], suspended: str) -> None:
        """Another device has the tenant from now on, has suspended it for this reason, if there is one, and has these versions
        paged out of those that are published next.
        """
        self.suspend(suspended)

    def use(self, new: Descriptors) -> Descriptors:
        """Change links; returns the old one."""
        old, self.descriptors = self.descriptors, new
        return old

    def serve(self) -> None:
        """Another process has the device side now: each model is served from the moment at which it is published."""
        self._ended = ""
        self._refuse(self._suspended)

    def fail_in_flight(self, reason: str, queued: bool = True) -> None:
        """As `ManagedFrontend.fail_in_flight`; with `queued` until `serve`, and no model is served any more that is not
        published again.
        """
        if queued:
            self._ended, self._suspended = reason, ""

    def lost(self) -> Collection[str]:
        """The models that were served when the device side ended, and have not been published since."""
        return ()

    def loading(self, name: str) -> AbstractContextManager[None]:
        """Within the block this device loads a model on request: each device of the tenant has it then, or none."""
        return nullcontext()

    @abstractmethod
    def _refuse(self, reason: str) -> None:
        """Have the HTTP process refuse requests of this device, and fail those that it has; with "" take some again."""

    @abstractmethod
    def served(self) -> list[ModelVersion]:
        """The models that this device has published last."""

    @abstractmethod
    def last_uses_known(self) -> Mapping[str, int]:
        """When each model was last used, as far as the supervisor knows without asking, on any clock; 0 for never."""

    @abstractmethod
    async def relink(self, limit: float = math.inf) -> Callable[[], None]:
        """As `ManagedFrontend.relink`."""

    def _ignores(self, name: str, served: Collection[ModelVersion], problems: Collection[IndexEntry]) -> bool:
        """Whether a publication is not for the tenant: the process is sent its new list once all is loaded."""
        return bool((served or problems) and self.allows and not self.allows(name))
