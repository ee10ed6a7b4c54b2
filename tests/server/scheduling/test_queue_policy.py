"""Parsing the queue policies of `dynamic_batching` in config.pbtxt, and the errors for invalid ones."""

import pytest

from server.repository.model_config import ConfigRefused, parse
from server.scheduling.queue_policy import QueueLimits, QueuePolicy

KEY = "dynamic_batching.default_queue_policy"


def queues(text: str) -> QueuePolicy | None:
    return parse(f"dynamic_batching {{ {text} }}", "m/config.pbtxt").queues


def test_the_size_and_timeout_of_a_queue_are_read() -> None:
    policy = queues("default_queue_policy { max_queue_size: 3 default_timeout_microseconds: 500 }")
    assert policy == QueuePolicy(QueueLimits(3, 0.0005, KEY))
    assert policy.limits_for(0) == policy.limits_for(7) == policy.limits


def test_a_priority_level_may_have_limits_of_its_own() -> None:
    policy = queues(
        "priority_levels: 2 default_priority_level: 2 default_queue_policy { max_queue_size: 3 } "
        "priority_queue_policy { key: 1 value { max_queue_size: 1 } }"
    )
    assert policy
    assert (policy.levels, policy.default, policy.limits_for(1).size, policy.limits_for(2).size) == (2, 2, 1, 3)
    assert policy.limits_for(1).full_text.endswith("(dynamic_batching.priority_queue_policy 1.max_queue_size)")


def test_timeout_action_delay_has_no_timeout_and_is_reported_as_unread() -> None:
    text = (
        "dynamic_batching { default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 max_queue_size: 1 } }"
    )
    config = parse(text, "m/config.pbtxt")
    assert config.queues == QueuePolicy(QueueLimits(1, 0.0, KEY))
    assert config.unread == ("dynamic_batching.default_queue_policy.timeout_action",)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("priority_levels: 2", "default_priority_level is 0; expected 1 to 2, the priority_levels"),
        ("priority_levels: 2 default_priority_level: 3", "default_priority_level is 3; expected 1 to 2, the priority_levels"),
        (
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value {} }",
            "priority_queue_policy has a key 3; expected 1 to 2, the priority_levels",
        ),
        ("priority_queue_policy { key: 1 value {} }", "priority_queue_policy has a key 1; expected none, as there are no"),
    ],
)
def test_priorities_outside_the_levels_are_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigRefused) as refused:
        queues(text)
    assert str(refused.value).startswith(f"m/config.pbtxt: dynamic_batching.{error}")


def test_without_levels_any_priority_is_taken_as_it_is() -> None:
    free, levelled = QueuePolicy(QueueLimits(1, 0, KEY)), QueuePolicy(QueueLimits(0, 0, KEY), 3, 1)
    assert [free.priority(each) for each in (0, 1, 9)] == [0, 1, 9]
    assert [levelled.priority(each) for each in (0, 1, 3, 4)] == [1, 1, 3, 1]
