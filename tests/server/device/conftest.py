"""A repository of two models."""

from pathlib import Path

import pytest

from .test_runtime import add_model


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        add_model(tmp_path, name)
    return tmp_path
