"""What is sent to the process that replaces one with a device side."""

from server.control.stretch import Wide
from server.processes.remote.kept_state import KeptState


def test_wide_partitions_that_were_planned_before_a_move_are_not_those_of_a_replacement() -> None:
    """Their granules may be other tenants' by now."""
    kept = KeptState()
    kept.on_started({"acme": (0, 1), "globex": (2, 3)})
    kept.plans = {"acme": Wide((0, 1, 3), {"globex": (3,)}, 0.001)}
    kept.on_moved({"acme": (0,), "globex": (1, 2, 3)})
    assert kept.plans == {}
    assert kept.start().granules == {"acme": (0,), "globex": (1, 2, 3)}


def test_a_tenant_whose_wide_partition_was_taken_away_has_none_and_the_others_keep_theirs() -> None:
    kept = KeptState()
    kept.plans = {name: Wide((0, 1), {"globex": (1,)}, 0.001) for name in ("acme", "initech")}
    kept.on_narrowed(["acme"])
    assert list(kept.plans) == ["initech"]
