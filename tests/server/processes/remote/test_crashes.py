"""Which models are left out because processes ended while they loaded them."""

import pytest

from server.control.descriptions import CRASHED
from server.processes.remote.kept_state import MOST_CRASHES, LoadCrashes


def end(crashes: LoadCrashes, times: int = 1, **loading: str) -> None:
    for _ in range(times):
        for tenant, model in loading.items():
            crashes.on_loading(tenant, model)
        crashes.on_end("the device process")


def test_a_model_is_left_out_when_processes_ended_often_enough_while_they_loaded_it(caplog: pytest.LogCaptureFixture) -> None:
    crashes = LoadCrashes()
    end(crashes, MOST_CRASHES - 1, acme="m")
    assert crashes.left_out() == {}
    end(crashes, acme="m")
    assert crashes.left_out() == {("acme", "m"): CRASHED}
    assert crashes.crashes("acme", "m")
    assert not crashes.crashes("globex", "m")
    assert caplog.messages[0] == "the device process ended while it loaded model m of acme"
    assert caplog.messages[-1].endswith("; it is left out until it is loaded on request")


def test_a_load_that_succeeds_resets_the_count_of_crashes() -> None:
    crashes = LoadCrashes()
    end(crashes, MOST_CRASHES, acme="m", globex="other")
    crashes.on_loading("acme", "m")
    crashes.on_loading("acme", "")
    assert crashes.left_out() == {("globex", "other"): CRASHED}
    end(crashes, MOST_CRASHES - 1, acme="m")
    assert crashes.left_out() == {("globex", "other"): CRASHED}


def test_a_process_that_ends_while_it_loads_nothing_leaves_nothing_out() -> None:
    crashes = LoadCrashes()
    crashes.on_loading("acme", "m")
    crashes.on_loading("acme", "")
    end(crashes, MOST_CRASHES)
    assert crashes.left_out() == {}
