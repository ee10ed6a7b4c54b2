"""How requests for one model may wait for their turn: what `dynamic_batching` of a configuration says of its queues. Pure.

As Triton has it: each priority has a queue of its own if there are levels, else all have one; a queue that is full refuses
what comes, and a request that has waited too long is refused. Both are 503.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DELAY = 1
"""The number of the `timeout_action` that has those wait on whose time has passed, behind all others."""


class QueueLimits(NamedTuple):
    """Of one queue: how many may wait and for how many seconds, 0 for any; `key` is what says so, as errors call it."""

    size: int
    timeout: float
    key: str

    @property
    def full(self) -> str:
        """What to tell a request that there is no room for, in Triton's words first."""
        return f"Exceeds maximum queue size: {self.size} may wait for this model, and as many do ({self.key}.max_queue_size)"

    @property
    def over(self) -> str:
        """What to tell a request that has waited too long, in Triton's words first."""
        key = f"{self.key}.default_timeout_microseconds"
        return f"Request timeout expired: {self.timeout * 1e6:.0f} microseconds in the queue ({key})"


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The queues of one model. `levels` is how many priorities there are, 0 where any is taken as it comes and all have one
    queue; `usual` is the priority of requests that have none, or one beyond; `own` are limits by priority.
    """

    limits: QueueLimits
    levels: int = 0
    usual: int = 0
    own: Mapping[int, QueueLimits] = field(default_factory=dict)

    def priority(self, asked: int) -> int:
        """The priority of a request that asks for this one, 0 being none."""
        return self.usual if self.levels and not 0 < asked <= self.levels else asked

    def of(self, priority: int) -> QueueLimits:
        """What holds for requests of a priority."""
        return self.own.get(priority, self.limits)


def read_queues(message: Any) -> QueuePolicy | None:
    """What a `dynamic_batching` says of queues; None if nothing. Raises ValueError naming the field."""
    levels, usual = message.priority_levels, message.default_priority_level
    if levels and not 1 <= usual <= levels:
        raise ValueError(f"dynamic_batching.default_priority_level is {usual}; expected 1 to {levels}, the priority_levels")
    if wrong := [level for level in sorted(message.priority_queue_policy) if not 1 <= level <= levels]:
        expected = f"1 to {levels}, the priority_levels" if levels else "none, as there are no priority_levels"
        raise ValueError(f"dynamic_batching.priority_queue_policy has a key {wrong[0]}; expected {expected}")
    limits = _limits(message.default_queue_policy, "dynamic_batching.default_queue_policy")
    own = {
        level: _limits(message.priority_queue_policy[level], f"dynamic_batching.priority_queue_policy {level}")
        for level in sorted(message.priority_queue_policy)
    }
    says = levels or any(each.size or each.timeout for each in (limits, *own.values()))
    return QueuePolicy(limits, levels, usual, own) if says else None


def _limits(message: Any, key: str) -> QueueLimits:
    timeout = 0.0 if message.timeout_action == DELAY else message.default_timeout_microseconds / 1e6
    return QueueLimits(message.max_queue_size, timeout, key)
