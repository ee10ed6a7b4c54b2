"""How one model's requests are joined, and the limits of its queues, by `dynamic_batching` of its configuration. Pure.

As in Triton: with priority levels each priority has its own queue, else there is one. A request is refused (503) if its queue
is full, or once it has been queued for too long.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engines.signature import Signature

DELAY = 1
"""Triton's `timeout_action` DELAY: a request that timed out stays queued, behind all others."""


@dataclass(frozen=True, slots=True)
class Batching:
    """How requests for one model are batched: up to `most` rows, after at most `delay` seconds while another work may start.

    `preferred` are the batch sizes, ascending, at which a batch does not wait for more.
    """

    signature: Signature
    most: int
    delay: float = 0.0
    preferred: tuple[int, ...] = ()


class QueueLimits(NamedTuple):
    """Limits of one queue: its size, and seconds in it; 0: no limit. `key` is the configuration field, for error texts."""

    size: int
    timeout: float
    key: str

    @property
    def full_text(self) -> str:
        """The error of a request that there is no room for; begins with Triton's words."""
        return f"Exceeds maximum queue size: {self.size} may wait for this model, and as many do ({self.key}.max_queue_size)"

    @property
    def timeout_text(self) -> str:
        """The error of a request that has been queued for too long; begins with Triton's words."""
        key = f"{self.key}.default_timeout_microseconds"
        return f"Request timeout expired: {self.timeout * 1e6:.0f} microseconds in the queue ({key})"


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The queues of one model. `levels` is the number of priorities; 0 for a single queue that takes any priority. `default` is
    the priority of requests that have none or an invalid one; `by_priority` are limits that differ from `limits`.
    """

    limits: QueueLimits
    levels: int = 0
    default: int = 0
    by_priority: Mapping[int, QueueLimits] = field(default_factory=dict)

    def priority(self, asked: int) -> int:
        """The priority of a request that asks for this one (0: for none)."""
        return self.default if self.levels and not 0 < asked <= self.levels else asked

    def limits_for(self, priority: int) -> QueueLimits:
        """The limits of the queue for this priority."""
        return self.by_priority.get(priority, self.limits)


def read_queues(message: Any) -> QueuePolicy | None:
    """The queues that `dynamic_batching` configures; None if it configures none. Raises ValueError naming the field."""
    levels, default = message.priority_levels, message.default_priority_level
    if levels and not 1 <= default <= levels:
        raise ValueError(f"dynamic_batching.default_priority_level is {default}; expected 1 to {levels}, the priority_levels")
    if wrong := [level for level in sorted(message.priority_queue_policy) if not 1 <= level <= levels]:
        expected = f"1 to {levels}, the priority_levels" if levels else "none, as there are no priority_levels"
        raise ValueError(f"dynamic_batching.priority_queue_policy has a key {wrong[0]}; expected {expected}")
    limits = _limits(message.default_queue_policy, "dynamic_batching.default_queue_policy")
    by_priority = {
        level: _limits(message.priority_queue_policy[level], f"dynamic_batching.priority_queue_policy {level}")
        for level in sorted(message.priority_queue_policy)
    }
    configured = levels or any(each.size or each.timeout for each in (limits, *by_priority.values()))
    return QueuePolicy(limits, levels, default, by_priority) if configured else None


def _limits(message: Any, key: str) -> QueueLimits:
    timeout = 0.0 if message.timeout_action == DELAY else message.default_timeout_microseconds / 1e6
    return QueueLimits(message.max_queue_size, timeout, key)
