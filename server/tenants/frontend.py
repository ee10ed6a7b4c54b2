"""A frontend: a tenant's HTTP side as another part of the server sees it. It sends tickets, and is sent models and states.

What is asked of it depends on who asks: a runtime (`Frontend`, whose `HttpSide` it calls), or the controller
(`ManagedFrontend`). What it is depends on where the HTTP side is: in this process (`local_frontend.LocalFrontend`), or in
another one, which the supervisor reaches by a `RemoteFrontend` (`processes.remote`). A device process has a `LinkedFrontend`
(`processes.device_side`), which calls that one's `HttpSide` over the supervisor. Who asks does not know which.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..link.messages import ModelKey
from ..link.ring import Link
from ..scheduling.lane_statistics import LaneStatistics, SlotStatistics
from .catalog import IndexEntry, ModelVersion, none_ready
from .statistics import ModelStatistics

State = Literal["starting", "serving", "incomplete", "draining", "lost", "closed"]
"""The server's state. `incomplete`: it serves, but a model failed to load and `server.strict_readiness` requires all, or all of
them failed."""


SILENT = 3.0
"""Seconds without an answer of a process, from which on its tenant counts as not served."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A version of a model, its counters, and how many requests are queued for it."""

    name: str
    version: str
    statistics: ModelStatistics
    pending: int


@dataclass(frozen=True, slots=True)
class Report:
    """The counters and model index of a tenant's HTTP side, `age` seconds old if it did not answer now.

    `lending` is, for a tenant that lends, whether it does so now, and how often it stopped.
    """

    served: Sequence[ModelReport]
    index: Sequence[IndexEntry]
    lane: LaneStatistics
    slots: SlotStatistics
    age: float = 0.0
    lending: tuple[bool, int] | None = None

    @property
    def ready(self) -> bool:
        """Whether the tenant is served any of the models that it asks for, and its process answers."""
        return self.age < SILENT and not none_ready(self.index)


class DeviceSide(Protocol):
    """What a frontend may ask of the runtime besides sending tickets."""

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        """Cancel a ticket that was sent, if it can be; its completion still comes."""


class HttpSide:
    """What a device side calls of one tenant's HTTP side; this is one that is not there.

    Every method belongs to the event loop of the process that has it. Another process calls it by `processes.channels.calls`.
    """

    def announce(self, name: str) -> None:
        """Mark a model as loading; versions that are served stay."""

    def listed(self) -> None:
        """Every model that there is was announced."""

    async def agree(self, name: str, served: Sequence[ModelVersion]) -> str:
        """These versions of a model, all that it is to have, are about to be published. "", or why not: the functions of one
        cannot be run.

        Waits until the functions run. After "" `publish` follows, or `withdraw`.
        """
        return ""

    def withdraw(self, name: str) -> None:
        """What was agreed to will not be published."""

    async def publish(self, name: str, served: list[ModelVersion], problems: list[IndexEntry]) -> bool:
        """Serve exactly these versions of a model; return when no request is left for those that they replace.

        False if the HTTP process has died, so that it is unknown whether its requests have ended.
        """
        return False

    async def last_uses(self) -> Mapping[ModelKey, int]:
        """When the last request for each version was answered, on the clock of `time.monotonic_ns`; 0 for never."""
        return {}

    async def page_out(self, model: ModelKey) -> bool:
        """Show this version as paged out, unless a request for it is queued or in flight; whether it is shown so."""
        return False

    def page_in(self, model: ModelKey) -> None:
        """Do not show this version as paged out any more."""

    def set_cores(self, cores: frozenset[int] | None) -> None:
        """Set the host's cores that belong to the tenant's partition; None on a GPU."""

    def suspend(self, reason: str) -> None:
        """Refuse new requests and fail all current ones for this reason; with "" accept requests again."""

    def distrust(self, reason: str) -> None:
        """The HTTP process wrote to the link what it may not write: it is replaced, with a new link. Serve this one no more."""


class Frontend(Protocol):
    """One tenant's HTTP side as a runtime sees it. Every method belongs to the runtime's event loop."""

    @property
    def http_side(self) -> HttpSide:
        """What can be called of it."""

    @property
    def link(self) -> Link:
        """The device side's end of the link."""

    def open(self, device: DeviceSide) -> None:
        """Start receiving completions."""

    def close(self) -> None:
        """Stop receiving completions."""


class ManagedFrontend(Protocol):
    """One tenant's HTTP side as the control plane sees it. Every method belongs to the controller's event loop."""

    async def report(self) -> Report:
        """The current counters, or after about a second without an answer the last known ones."""

    def refuse(self, reason: str) -> None:
        """Refuse new requests for good."""

    def suspend(self, reason: str) -> None:
        """As `HttpSide.suspend`."""

    def fail_in_flight(self, reason: str, queued: bool = True) -> None:
        """The device side has ended, and nothing uses the memory of launched requests any more: fail them for this reason.

        With `queued` also fail those that wait, and refuse new ones until `suspend("")`. Nothing is launched before `relink`.
        """

    async def relink(self, limit: float = math.inf) -> Callable[[], None]:
        """Replace the link, which may be in use, by a new one to the same tensor memory; no request is lost or fails.

        Returns when tickets go over the new link: they wait there until it is served. Call what is returned when the device
        side has left the old link, to free it. Raises Conflict if what is in flight does not end within `limit` seconds; the
        old link stays in use then. A caller that is cancelled does not stop it.
        """

    async def drained(self) -> None:
        """Return when every accepted request has been answered."""


def not_ended(name: str, limit: float) -> str:
    """The text of Conflict for a link that was not replaced."""
    return (
        f"tenant {name}: an inference has been running for {limit:g} s; its link was not replaced, and it is served as before"
    )


class Lifecycle:
    """The server's state; `on_change` is called with every new state. Belongs to the event loop."""

    def __init__(self, on_change: Callable[[State], None]) -> None:
        self.state: State = "starting"
        self._on_change = on_change

    @property
    def ready(self) -> bool:
        """Whether the server is ready: loading has finished (`strict_readiness`: succeeded), and it is not stopping."""
        return self.state == "serving"

    def set_state(self, state: State) -> None:
        self.state = state
        self._on_change(state)
