"""When a process that does not answer counts as one that hangs, and what of a slow machine does not."""

import os
from pathlib import Path

from server.processes.children.heartbeat import INTERVAL, MAX_SILENCE, Activity, Heartbeat, StoppedTime, observe


def looks(heartbeat: Heartbeat, *activities: Activity, begin: float = 100.0, step: float = INTERVAL) -> int:
    """How many looks it takes until it hangs, with one activity a look; more than there are if it does not."""
    for number, activity in enumerate(activities, 1):
        if heartbeat.hangs(begin + number * step, activity):
            return number
    return len(activities) + 1


def asked() -> Heartbeat:
    """One that has answered before, and was asked again at 100 s."""
    heartbeat = Heartbeat()
    heartbeat.on_sent(99.0)
    heartbeat.on_answer()
    heartbeat.on_sent(100.0)
    return heartbeat


LIMIT = int(MAX_SILENCE / INTERVAL)


def test_a_process_that_is_stopped_or_sleeps_hangs_after_the_limit() -> None:
    for state in "TtS":
        assert looks(asked(), *[Activity(state, 1.0, 1.0)] * 99) == LIMIT


def test_a_process_that_is_busy_all_the_time_hangs_as_well() -> None:
    busy = [Activity("R", number * INTERVAL, 0.0) for number in range(99)]
    assert looks(asked(), *busy) == LIMIT + 1, "the first look has nothing to compare with"


def test_an_answer_resets_the_silence() -> None:
    heartbeat = asked()
    assert looks(heartbeat, *[Activity("S", 1.0, 1.0)] * (LIMIT - 1)) == LIMIT
    assert not heartbeat.answered
    heartbeat.on_answer()
    assert heartbeat.answered
    heartbeat.on_sent(100.0)
    assert looks(heartbeat, *[Activity("S", 1.0, 1.0)] * 99) == LIMIT


def test_time_in_which_it_waited_for_a_core_does_not_count() -> None:
    hungry = [Activity("R", number * INTERVAL / 5, number * INTERVAL * 4 / 5) for number in range(400)]
    assert looks(asked(), *hungry) >= 5 * LIMIT - 5
    assert looks(asked(), *[Activity("R", 1.0, 1.0)] * 99) == 100, "it did not run at all"


def test_time_in_which_it_waited_for_a_disk_does_not_count() -> None:
    assert looks(asked(), *[Activity("D", 1.0, 1.0)] * 99) == 100


def test_time_in_which_the_asking_process_was_not_run_does_not_count() -> None:
    assert looks(asked(), *[Activity("S", 1.0, 1.0)] * 5, step=60.0) == 6


def test_a_starting_process_has_more_time() -> None:
    heartbeat = Heartbeat()
    heartbeat.on_sent(100.0)
    assert looks(heartbeat, *[Activity("S", 1.0, 1.0)] * 5 * LIMIT) == 5 * LIMIT + 1


def test_the_kernel_says_what_this_process_does() -> None:
    before = observe(os.getpid())
    sum(range(10**6))
    now = observe(os.getpid())
    assert (now.state, now.stopped, now.ran > before.ran) == ("R", False, True)
    assert str(now) == "it is busy"
    assert observe(2**22 + 1) == Activity("X", 0.0, 0.0)


def test_without_scheduler_statistics_the_times_are_those_of_stat(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (some (odd) name) T 1 1 1 0 -1 0 0 0 0 0 150 25 0 0")
    assert observe(7, tmp_path) == Activity("T", 1.75, 0.0)


def test_the_time_for_which_a_process_is_stopped_starts_again_when_it_runs() -> None:
    time = StoppedTime()
    assert [time.after(now, Activity("T", 1.0, 0.0)) for now in (10.0, 10.25, 10.5)] == [0.0, 0.25, 0.5]
    assert time.after(10.75, Activity("S", 1.0, 0.0)) == 0.0
    assert [time.after(now, Activity("t", 1.0, 0.0)) for now in (11.0, 11.25)] == [0.0, 0.25]


def test_a_process_is_not_stopped_for_longer_than_the_asking_process_saw() -> None:
    time = StoppedTime()
    time.after(10.0, Activity("T", 1.0, 0.0))
    assert time.after(1000.0, Activity("T", 1.0, 0.0)) == 0.5
