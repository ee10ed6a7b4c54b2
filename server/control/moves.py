"""Moves of granules: whether one can be tried; and the last ones, who wanted them, why, what changed, and how long it took."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from partitions.plan import Granules

from ..errors import BadRequest, Conflict, Unavailable
from ..facts import Fact
from ..protocol.json_document import show
from .controlled_device import ControlledDevice
from .descriptions import NOT_OPENED, Paused

MOST_MOVES = 256
"""Moves that are kept."""

By = Literal["operator", "autopilot"]


class Move(Fact):
    """A repartition, or a tenant's move to another device."""

    number: Annotated[int, "Moves are numbered from the server's start."]
    at: Annotated[float, "When it began, in seconds since 1970."]
    by: By
    outcome: Annotated[
        Literal["moving", "moved", "refused", "proposed"],
        "`moving`: under way. `refused`: nothing has changed. `proposed`: the autopilot would have done it, but it only tries.",
    ]
    reason: Annotated[str, "What was moved from whom to whom and why; empty for an operator's repartition."]
    before: Annotated[dict[str, int], "Granules by tenant, of those whose share was to change."]
    after: dict[str, int]
    error: Annotated[str, "Why it was refused."]
    prepared_ms: Annotated[float, "Until models and partitions were ready, while all tenants were served."]
    took_ms: Annotated[float, "Until everything that the move left behind was closed."]
    paused: Annotated[dict[str, Paused], "By tenant that moved."]

    def __str__(self) -> str:
        """The reason and the durations, for the log."""
        pauses = [f"{name} paused for {each.ms:.1f} ms{' by ladder' * each.ladder}" for name, each in self.paused.items()]
        reason = [f"{self.by} moved {self.reason}"] if self.reason else []
        return "; ".join([*reason, f"prepared in {self.prepared_ms / 1e3:.3f} s", *pauses])


class MoveLog:
    """The last `MOST_MOVES` moves. Belongs to the controller's event loop."""

    def __init__(self) -> None:
        self._records: deque[Move] = deque(maxlen=MOST_MOVES)
        self._count = 0
        self.by_operator: float | None = None
        """When an operator last moved anything, or gave the shares that tenants had, on the clock of `time.monotonic`."""
        self.given: set[str] = set()
        """Tenants that an operator gave their share, also by a reload, since the autopilot last took their names from here."""

    def give(self, tenants: Iterable[str]) -> None:
        """An operator has given these tenants the shares that they have now."""
        self.by_operator = time.monotonic()
        self.given.update(tenants)

    def __iter__(self) -> Iterator[Move]:
        """The newest first."""
        return reversed(self._records)

    def begin(self, by: By, reason: str, before: Mapping[str, int], after: Mapping[str, int]) -> Move:
        """A move that begins now. Tenants that keep their share are left out."""
        self._count += 1
        changed = {name: count for name, count in after.items() if before.get(name) != count}
        was = {name: before[name] for name in changed if name in before}
        record = Move(self._count, round(time.time(), 3), by, "moving", reason, was, changed, "", 0.0, 0.0, {})
        self._records.append(record)
        return record


class TransferPlan(NamedTuple):
    """The devices that a tenant moves between, and the granules that it gets on the second."""

    source: ControlledDevice
    target: ControlledDevice
    granules: Granules


def check_counts(counts: Mapping[str, object], tenants: Collection[str]) -> None:
    """Check the numbers of granules that tenants are to have. Raises BadRequest."""
    for name, count in counts.items():
        if name not in tenants:
            raise BadRequest(f"{name}: there is no such tenant; there are {', '.join(tenants)}")
        _check_count(name, count)


def plan_transfer(
    devices: Sequence[ControlledDevice],
    tenant: str,
    to: str,
    count: int | None,
    state_of: Callable[[ControlledDevice], str],
    possible: bool,
) -> TransferPlan | None:
    """A known tenant's move to another device, onto so many granules or as many as it has; None if it is there with as many.

    `state_of` returns the state of a device; `possible` is whether this server can move tenants at all. Raises BadRequest,
    DoesNotFit with the arithmetic, Conflict for a device that is not open, Unavailable while one of the devices does not serve.
    """
    source = next(device for device in devices if tenant in device.runtimes)
    target = next((device for device in devices if device.name == to), None)
    if target is None:
        raise BadRequest(f"device: {show(to)} is not a device; expected {' or '.join(show(each.name) for each in devices)}")
    there = len(source.held[tenant].granules)
    count = there if count is None else count
    _check_count("granules", count)
    if target is source and count == there:
        return None
    if target is source:
        raise BadRequest(f"tenant {tenant} is on device {to} already; PUT /admin/partitions changes its granules")
    for device in (source, target):
        if (state := state_of(device)) not in ("serving", "incomplete"):
            raise Unavailable(f"device {device.name} is {state}; move tenant {tenant} when both devices serve")
    if not (possible and source.adopts and target.adopts):
        raise BadRequest(
            f"tenant {tenant} cannot move while it is served: on cores each tenant's process has its own device side; "
            f"set tenants.{tenant}.device and restart the server"
        )
    if target.info is NOT_OPENED:
        raise Conflict(f"device {to}: it had no tenant at the start, so it is not open; give it one, and restart the server")
    return TransferPlan(source, target, target.plan({tenant: count}).after[tenant])


def _check_count(name: str, count: object) -> None:
    """Raises BadRequest."""
    if type(count) is not int or count < 1:
        raise BadRequest(f"{name}: {show(count)} granules; expected an integer of at least 1")
