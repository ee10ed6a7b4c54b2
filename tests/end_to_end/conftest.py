"""One server with the standard repository for all tests that only talk to it, and others on request."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from . import repository
from .harness import Served, configuration, serving


@pytest.fixture(scope="package")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository.standard(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package", params=[False, True], ids=["asgi", "front"])
def served(standard: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Both ways in which inference requests reach the server; the answers must be the same."""
    with serving(configuration(standard), front=request.param) as served:
        yield served


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=30) as client:
        yield client
