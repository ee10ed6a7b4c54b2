"""One server with the standard repository for all tests that only talk to it, and others on request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import repository
from .harness import Served, configuration, serving
from .processes import configure, running


@pytest.fixture(scope="package")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository.standard(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package", params=["asgi", "direct", "processes"])
def served(standard: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every way in which requests reach the server; the answers must be the same.

    The last is a process of its own, so tests cannot look inside.
    """
    if request.param == "processes":
        tenants = '[tenants.acme]\ngranules = 1\nmodels = ["*"]'
        config = configure(tmp_path_factory.mktemp("served") / "c.toml", standard, tenants, default_tenant='"acme"')
        with running(config) as served:
            yield served
    else:
        with serving(configuration(standard), direct=request.param == "direct") as served:
            yield served


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A client. It verifies no certificates, of which there are none: httpx would take 24 ms to read whom to trust."""
    with httpx.Client(base_url=served.url, timeout=30, verify=False) as client:
        yield client
