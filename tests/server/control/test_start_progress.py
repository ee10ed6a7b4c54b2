"""How far a start is: counts, names for administrators alone, and the log."""

import logging

import pytest

from server.control.descriptions import Loading
from server.control.start_progress import StartProgress
from tests.passing_time import Clock

TENANTS = ("acme", "globex")
KERNELS = "compiling or loading the kernels of"
READING = "reading or building"


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def progress(clock: Clock) -> StartProgress:
    """Acme has 3 models and loads mob, globex 5 and loads enc."""
    progress = StartProgress(clock)
    progress.on_loading(Loading("acme", "", known=3), TENANTS)
    progress.on_loading(Loading("globex", "", known=5), TENANTS)
    progress.on_loading(Loading("acme", "mob", KERNELS, 1, 0, 3), TENANTS)
    progress.on_loading(Loading("globex", "enc", READING, 2, 0, 5), TENANTS)
    return progress


def test_administrators_see_which_models_are_loaded_and_others_how_many(progress: StartProgress) -> None:
    ready = "3 of 8 models are ready"
    assert progress.line(TENANTS) == f"{ready}; {KERNELS} mob (acme), {READING} enc (globex)"
    assert progress.public(TENANTS) == f"{ready}; {KERNELS} 1, {READING} 1"


def test_a_model_that_gets_ready_is_logged_with_the_seconds_that_it_took(
    progress: StartProgress, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "greenlane.control")
    clock.now = 40.0
    progress.on_loading(Loading("acme", "mob", "loading", 1, 0, 3), TENANTS)
    clock.now = 42.0
    progress.on_loading(Loading("acme", "", "", 2, 0, 3), TENANTS)
    text = f"model mob of acme is ready after 42.0 s; 4 of 8 models are ready; {READING} enc (globex)"
    assert caplog.messages == [text]
    progress.on_loading(Loading("globex", "", "", 2, 1, 5), TENANTS)
    assert caplog.messages == [text], "enc has failed"
    assert progress.line(TENANTS) == "4 of 8 models are ready, 1 cannot be served"


def test_of_many_models_that_are_being_loaded_a_few_are_named() -> None:
    progress, tenants = StartProgress(), [f"t{number}" for number in range(15)]
    for tenant in tenants:
        progress.on_loading(Loading(tenant, "m", READING, 0, 0, 1), tenants)
    assert progress.line(tenants).endswith(f"{READING} m (t3), 11 more")
    assert progress.public(tenants) == f"0 of 15 models are ready; {READING} 15"
