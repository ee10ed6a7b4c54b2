"""The last moves of granules: who wanted them, why, what changed, and how long it took."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .descriptions import Pause

MOST_MOVES = 256
"""Moves that are kept."""

By = Literal["operator", "autopilot"]
Outcome = Literal["moving", "moved", "refused", "proposed"]
"""`moving`: under way. `refused`: nothing has changed. `proposed`: by the autopilot, which only tries."""


@dataclass(slots=True)
class MoveRecord:
    """A repartition, or a tenant's move to another device. Durations are seconds.

    `before` and `after` are granules by tenant, of those whose share was to change.
    """

    number: int
    at: float
    """When it began, in seconds since 1970."""
    by: By
    reason: str
    before: dict[str, int]
    after: dict[str, int]
    outcome: Outcome = "moving"
    error: str = ""
    """Why it was refused."""
    prepared: float = 0.0
    """Until models and partitions were ready, while all tenants were served."""
    took: float = 0.0
    """From the beginning to the end, also of what is closed after the tenants are served again."""
    pauses: dict[str, Pause] = field(default_factory=dict)
    """By tenant that moved."""

    def __str__(self) -> str:
        """The reason and the durations, for the log."""
        pauses = [
            f"{name} paused for {1e3 * pause.seconds:.1f} ms{' by ladder' * pause.ladder}"
            for name, pause in self.pauses.items()
        ]
        return "; ".join(
            [*([f"{self.by} moved {self.reason}"] if self.reason else []), f"prepared in {self.prepared:.3f} s", *pauses]
        )


class MoveLog:
    """The last `MOST_MOVES` moves. Belongs to the controller's event loop."""

    def __init__(self) -> None:
        self._records: deque[MoveRecord] = deque(maxlen=MOST_MOVES)
        self._count = 0
        self.by_operator: float | None = None
        """When an operator last moved anything, or gave the shares that tenants had, on the clock of `time.monotonic`."""

    def __repr__(self) -> str:
        return f"<MoveLog of {self._count} moves>"

    def __iter__(self) -> Iterator[MoveRecord]:
        """The newest first."""
        return reversed(self._records)

    def begin(self, by: By, reason: str, before: Mapping[str, int], after: Mapping[str, int]) -> MoveRecord:
        """A move that begins now. Tenants that keep their share are left out."""
        self._count += 1
        changed = {name: count for name, count in after.items() if before.get(name) != count}
        was = {name: before[name] for name in changed if name in before}
        self._records.append(record := MoveRecord(self._count, time.time(), by, reason, was, changed))
        return record
