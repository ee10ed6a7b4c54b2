"""How long what dies is left alone. What the house does with real processes is in tests/end_to_end/test_fronts.py."""

from server.fronts.restarts import Restarts


def test_what_dies_late_is_started_at_once() -> None:
    restarts = Restarts()
    restarts.started(100.0)
    assert restarts.pause(106.0) == 0.0


def test_what_dies_again_and_again_is_left_alone_for_longer_and_longer_up_to_a_bound() -> None:
    restarts, pauses = Restarts(), []
    for _ in range(10):
        restarts.started(100.0)
        pauses.append(restarts.pause(100.1))
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-2:] == [10.0, 10.0]
    restarts.started(100.0)
    assert restarts.pause(200.0) == 0.0
    assert restarts.pause(100.1) == 0.1, "it begins anew once it was stable"
