"""One server with the standard repository for all tests that only talk to it, and others on request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import repository
from .fixtures import WAYS, served_as
from .harness import Served
from .processes import Running
from .wire import as_before, client, until


@pytest.fixture(scope="package")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository.standard(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package", params=WAYS[:3])
def served(standard: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every way in which requests reach the server; the answers must be the same.

    The last is a process of its own, so tests cannot look inside.
    """
    with served_as(request.param, standard, tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A client of this or of the module's own `served`."""
    with client(served) as http:
        yield http


@pytest.fixture
def acme(server: Running) -> Iterator[httpx.Client]:
    """A client of acme's, once the module's `server` serves that."""
    with client(server, "acme") as http:
        until(lambda: as_before(http))
        yield http
