"""The process that copies a remote repository: asked again and again, and started again when it has ended."""

import logging
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from server.config.schema import ModelsConfig
from server.config.tables import ConfigError
from server.repository.mirror import FIRST_PAUSE, LONGEST_PAUSE, Mirror, fetch_first


@pytest.fixture
def models(tmp_path: Path) -> ModelsConfig:
    (tmp_path / "there" / "a" / "1").mkdir(parents=True)
    (tmp_path / "there" / "a" / "1" / "model.onnx").write_text("a1")
    return ModelsConfig(repository=tmp_path / "copy", remote=f"file://{tmp_path}/there")


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def mirror(models: ModelsConfig, clock: FakeClock) -> Iterator[Mirror]:
    with closing(Mirror(models, clock)) as mirror:
        yield mirror


def pid(mirror: Mirror) -> int:
    found: int = vars(mirror)["_process"].pid
    return found


AGAIN = "(tried again after 1 s, then after twice that each time, up to 60 s)"


def test_one_process_copies_again_and_again_and_another_when_it_has_ended(
    mirror: Mirror, models: ModelsConfig, clock: FakeClock
) -> None:
    assert mirror.fetch().changed == ["a"]
    first = pid(mirror)
    assert mirror.fetch().changed == []
    assert pid(mirror) == first
    os.kill(first, signal.SIGKILL)
    error = mirror.fetch().error
    assert error == f"{models.remote}: the process that copies it ended with status -9, and the log has what it printed"
    clock.now += FIRST_PAUSE
    assert mirror.fetch().error == ""


def test_a_failure_is_logged_once_and_the_copy_stays(
    mirror: Mirror, models: ModelsConfig, tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    mirror.fetch()
    (tmp_path / "there").rename(tmp_path / "away")
    with caplog.at_level(logging.INFO):
        (error,) = {_after(LONGEST_PAUSE, mirror, clock) for _ in range(3)}
        assert caplog.messages == [f"models.repository: {error} {AGAIN}"]
        (tmp_path / "away").rename(tmp_path / "there")
        assert _after(LONGEST_PAUSE, mirror, clock) == ""
        assert caplog.messages[1:] == [f"models.repository: {models.remote} can be copied again"]
        (tmp_path / "there").rename(tmp_path / "away")
        _after(0.0, mirror, clock)
        assert caplog.messages[2:] == caplog.messages[:1], "once more after it was away"
    fetch_first(models)
    assert (models.repository / "a" / "1" / "model.onnx").read_text() == "a1"
    with pytest.raises(ConfigError, match=r"^models.repository: file://.*/there cannot be read: there is no model"):
        fetch_first(models.model_copy(update={"repository": tmp_path / "another"}))


def test_a_repository_that_fails_is_left_alone_for_pauses_that_double(mirror: Mirror, tmp_path: Path, clock: FakeClock) -> None:
    mirror.fetch()
    (tmp_path / "there").rename(tmp_path / "away")
    error = mirror.fetch().error
    for pause in (1.0, 2.0, 4.0):
        (tmp_path / "away").rename(tmp_path / "there")
        assert _after(pause - 0.1, mirror, clock) == error, "it is not tried yet"
        (tmp_path / "there").rename(tmp_path / "away")
        assert _after(0.1, mirror, clock) == error
    (tmp_path / "away").rename(tmp_path / "there")
    assert _after(8.0, mirror, clock) == ""
    (tmp_path / "there").rename(tmp_path / "away")
    assert mirror.fetch().error == error
    (tmp_path / "away").rename(tmp_path / "there")
    assert _after(1.0, mirror, clock) == "", "after a success it begins with the first pause"


def test_a_model_that_fails_is_left_alone_for_a_pause_and_the_others_are_not(
    mirror: Mirror, models: ModelsConfig, tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    mirror.fetch()
    caplog.clear()
    broken, other = (tmp_path / "there" / name / "1" / "model.onnx" for name in ("broken", "a"))
    broken.parent.mkdir(parents=True)
    broken.symlink_to(tmp_path / "nowhere")  # It is listed, and cannot be fetched.
    assert list(mirror.fetch().failed) == ["broken"]
    other.write_text("another")
    outcome = mirror.fetch()
    assert (outcome.changed, outcome.failed) == (["a"], {})
    clock.now += FIRST_PAUSE
    assert list(mirror.fetch().failed) == ["broken"]
    broken.unlink()
    broken.write_text("it")
    assert mirror.fetch().changed == []
    clock.now += 2 * FIRST_PAUSE
    assert mirror.fetch().changed == ["broken"]
    logged = [message for message in caplog.messages if "copied from" not in message]
    assert logged[0].startswith(f"models.repository: broken of {models.remote} stays as it was: ")
    assert logged[0].endswith(f"; check its files {AGAIN}")
    assert logged[1:] == [f"models.repository: broken of {models.remote} can be copied again"]


def test_a_service_that_does_not_answer_is_given_up_after_the_limit_and_asked_by_another_process(
    tmp_path: Path, clock: FakeClock
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/models"
        with closing(Mirror(ModelsConfig(repository=tmp_path / "copy", remote=url), clock, limit=0.2)) as mirror:
            for _ in range(2):
                error = _after(LONGEST_PAUSE, mirror, clock)
                text = "(opening|listing) it was broken off after 0.2 s without an answer; check the address"
                assert re.fullmatch(f"{url} cannot be read: {text}", error), "opening, if the library is long to import"


def _after(seconds: float, mirror: Mirror, clock: FakeClock) -> str:
    """What is wrong with the repository so much later."""
    clock.now += seconds
    return mirror.fetch().error


def test_after_it_is_closed_nothing_is_copied(mirror: Mirror, models: ModelsConfig) -> None:
    mirror.close()
    assert mirror.fetch().error
    assert not models.repository.exists()
