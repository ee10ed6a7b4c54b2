"""What one device process needs of a tenant's HTTP process, as the supervisor sees both."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ...link.messages import ModelKey
from ...link.ring import Descriptors
from ...tenants.catalog import IndexEntry, ServedModel


class LinkedFrontend(Protocol):
    """A `RemoteFrontend`, or one device's part of a `SpreadFrontend`."""

    descriptors: Descriptors

    def served(self) -> list[ServedModel]:
        """The models that this device has published last."""

    def announce(self, name: str) -> None:
        """As `Frontend.announce`."""

    def listed(self) -> None:
        """As `Frontend.listed`."""

    def begin_load(self, name: str) -> None:
        """This device loads a model on request; `end_load` follows."""

    def end_load(self, name: str, error: Exception | None) -> None:
        """That has ended, with this error or none."""

    async def agree(self, name: str, served: Sequence[ServedModel]) -> str:
        """As `Frontend.agree`."""

    def withdraw(self, name: str) -> None:
        """As `Frontend.withdraw`."""

    async def publish(self, name: str, served: list[ServedModel], problems: list[IndexEntry]) -> bool:
        """As `Frontend.publish`."""

    async def last_uses(self) -> Mapping[ModelKey, int]:
        """As `Frontend.last_uses`."""

    async def page_out(self, model: ModelKey) -> bool:
        """As `Frontend.page_out`."""

    def page_in(self, model: ModelKey) -> None:
        """As `Frontend.page_in`."""

    def set_cores(self, cores: frozenset[int] | None) -> None:
        """As `Frontend.set_cores`."""

    def suspend(self, reason: str) -> None:
        """As `Frontend.suspend`; of a tenant on several devices, requests for this one."""

    def distrust(self, reason: str) -> None:
        """As `Frontend.distrust`."""

    def fail_in_flight(self, reason: str, queued: bool = True) -> None:
        """As `ManagedFrontend.fail_in_flight`; of a tenant on several devices, what is in flight on this one."""

    async def relink(self, limit: float = math.inf) -> Callable[[], None]:
        """As `ManagedFrontend.relink`."""
