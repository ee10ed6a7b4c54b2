"""When a silence is too long, and how a container's first process ends; what else is done is in end_to_end/test_watchdog.py."""

import signal
import subprocess
import sys

from server.host.watch import EXIT, Silence, interval, last_signal

HOLDS_THE_GIL = """
import ctypes
from server.host.watch import EXIT
from server.host.watchdog import exit_on
exit_on(EXIT)
print("ready", flush=True)
mutex = ctypes.create_string_buffer(64)
[ctypes.PyDLL(None).pthread_mutex_lock(mutex) for _ in "12"]
"""
"""The second lock blocks for ever, and no signal interrupts it."""


def silent(silence: Silence, *times: float, stopped: bool = False) -> list[bool]:
    return [silence.is_too_long(now, stopped) for now in times]


def test_a_silence_is_too_long_once_it_has_lasted_the_limit() -> None:
    assert silent(Silence(3.0, 100.0), 101.0, 102.0, 103.0) == [False, False, True]


def test_a_heartbeat_ends_a_silence() -> None:
    silence = Silence(3.0, 100.0)
    assert not any(silent(silence, 101.0, 102.0))
    silence.end(102.5)
    assert silent(silence, 103.5, 104.5, 105.5) == [False, False, True]


def test_time_in_which_the_watched_process_was_stopped_does_not_count() -> None:
    silence = Silence(3.0, 100.0)
    assert not any(silent(silence, 101.0, 102.0))
    assert not any(silent(silence, *(102.0 + second for second in range(1, 100)), stopped=True))
    assert silent(silence, 202.0) == [True]


def test_time_in_which_the_watchdog_was_not_run_does_not_count() -> None:
    silence = Silence(3.0, 100.0)
    assert silent(silence, 101.0, 102.0, 4000.0, 4001.0) == [False, False, False, True]


def test_several_heartbeats_fit_into_the_time_after_which_a_server_is_not_ready() -> None:
    """That is a quarter of the limit."""
    assert interval(20.0) == 1.0
    assert interval(1.0) * 2 <= 1.0 / 4


def test_the_first_process_of_a_container_is_ended_by_a_signal_that_it_handles() -> None:
    """The kernel drops all others that come from inside the container, SIGKILL as well."""
    assert (last_signal(1), last_signal(2)) == (EXIT, signal.SIGKILL)


def test_that_signal_ends_a_process_while_a_thread_holds_the_gil() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS_THE_GIL], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(EXIT)
        try:
            assert process.wait(30) == EXIT
        finally:
            process.kill()
