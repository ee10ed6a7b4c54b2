"""The directory in which a server caches plans and kernels."""

from pathlib import Path

import pytest

from server.config.schema import ModelsConfig
from server.device.ahead import open_builds


def chosen(models: ModelsConfig) -> Path:
    cache = open_builds(models).cache
    assert cache
    return cache.path()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_the_configured_cache_is_used(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert chosen(ModelsConfig(repository=tmp_path / "models", cache=tmp_path / "kept")) == tmp_path / "kept"
    assert not list((tmp_path / "models").iterdir())


def test_the_default_cache_is_in_the_repository_unless_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository that is read-only, shown by one that is a file, which stops root too."""
    models = tmp_path / "models"
    models.mkdir()
    assert chosen(ModelsConfig(repository=models)) == models / ".greenlane"
    (models / ".greenlane").rmdir()
    models.rmdir()
    models.touch()
    assert chosen(ModelsConfig(repository=models)) == tmp_path / "home" / ".cache" / "greenlane"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert chosen(ModelsConfig(repository=models)) == tmp_path / "xdg" / "greenlane"


def test_without_a_cache_no_directory_is_left(tmp_path: Path) -> None:
    open_builds(ModelsConfig(repository=tmp_path))
    assert not list(tmp_path.iterdir())
