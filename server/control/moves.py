"""The last moves of granules: who wanted them, why, what changed, and how long it took."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from ..facts import Fact
from .descriptions import Paused

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
