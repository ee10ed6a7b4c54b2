"""A tenant's HTTP side as the device side sees it: where tickets come from, who is told what can be asked for.

It may be in this process (`service.LocalFrontend`) or in another one (`processes.remote_frontend`); the runtime cannot tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..link.ring import Link
from ..scheduling.lane import LaneStatistics
from ..scheduling.slot_pool import SlotStatistics
from .catalog import IndexEntry, ServedModel
from .statistics import ModelStatistics

State = Literal["starting", "serving", "incomplete", "draining", "lost", "closed"]
"""Of the server. It is incomplete when it serves, but not every model, and `server.strict_readiness` asks for all of them."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model at a version, what was counted of it, and how many requests for it wait."""

    name: str
    version: str
    statistics: ModelStatistics
    pending: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a tenant's HTTP side has counted so far, and its index; `age` seconds ago, as it does not answer now, or 0."""

    served: Sequence[ModelReport]
    index: Sequence[IndexEntry]
    lane: LaneStatistics
    slots: SlotStatistics
    age: float = 0.0


class Backend(Protocol):
    """What a frontend may ask of the runtime, besides the tickets that come over its link."""

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        """Stop a ticket that was handed over, if it can be stopped; its completion still comes."""


class Frontend(Protocol):
    """One tenant's HTTP side. Every method belongs to the runtime's event loop."""

    @property
    def link(self) -> Link:
        """The device side's end of the link."""

    def open(self, device: Backend) -> None:
        """Begin: completions are heard from now on."""

    def announce(self, name: str) -> None:
        """This model is being loaded; what serves goes on."""

    async def publish(self, name: str, served: list[ServedModel], problems: list[IndexEntry]) -> bool:
        """Serve these versions of a model from now on; return once no request is left for what they replace.

        False if nobody is there any more who would know.
        """

    def set_cores(self, cores: frozenset[int] | None) -> None:
        """These of the host's cores are the tenant's own now; None if the hardware does not say."""

    async def report(self) -> Report:
        """What was counted; within a second or so, though that may be what was known before."""

    def refuse(self, reason: str) -> None:
        """Take no more requests."""

    def suspend(self, reason: str) -> None:
        """Take no requests for now, and tell everyone who waits why; with "" take them again."""

    async def drained(self) -> None:
        """Return once every request that was taken has been answered."""

    def close(self) -> None:
        """Hear no more."""
