"""The process that copies a remote repository: asked again and again, and started again when it has ended."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from server.config.schema import ModelsConfig
from server.config.section import ConfigError
from server.repository.mirror import Mirror, fetch_first


@pytest.fixture
def models(tmp_path: Path) -> ModelsConfig:
    (tmp_path / "there" / "a" / "1").mkdir(parents=True)
    (tmp_path / "there" / "a" / "1" / "model.onnx").write_text("a1")
    return ModelsConfig(repository=tmp_path / "copy", remote=f"file://{tmp_path}/there")


@pytest.fixture
def mirror(models: ModelsConfig) -> Iterator[Mirror]:
    with closing(Mirror(models)) as mirror:
        yield mirror


def pid(mirror: Mirror) -> int:
    found: int = vars(mirror)["_process"].pid
    return found


def test_one_process_copies_again_and_again_and_another_when_it_has_ended(mirror: Mirror, models: ModelsConfig) -> None:
    assert mirror.fetch().changed == ["a"]
    first = pid(mirror)
    assert mirror.fetch().changed == []
    assert pid(mirror) == first
    os.kill(first, signal.SIGKILL)
    error = mirror.fetch().error
    assert error == f"{models.remote}: the process that copies it ended with status -9, and the log has what it printed"
    assert mirror.fetch().error == ""


def test_a_failure_is_logged_once_and_the_copy_stays(
    mirror: Mirror, models: ModelsConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror.fetch()
    (tmp_path / "there").rename(tmp_path / "away")
    with caplog.at_level(logging.ERROR):
        errors = {mirror.fetch().error for _ in range(2)}
    assert [record.message for record in caplog.records] == [f"models.repository: {error}" for error in errors]
    fetch_first(models)
    assert (models.repository / "a" / "1" / "model.onnx").read_text() == "a1"
    with pytest.raises(ConfigError, match=r"^models.repository: file://.*/there cannot be read: there is no model"):
        fetch_first(models.model_copy(update={"repository": tmp_path / "another"}))


def test_after_it_is_closed_nothing_is_copied(mirror: Mirror, models: ModelsConfig) -> None:
    mirror.close()
    assert mirror.fetch().error
    assert not models.repository.exists()
