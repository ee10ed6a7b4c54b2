"""A repository of two models, and a runtime that serves it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .test_runtime import Site, add_model, serving


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        add_model(tmp_path, name)
    return tmp_path


@pytest.fixture
async def site(root: Path) -> AsyncIterator[Site]:
    async with serving(root) as site:
        yield site
