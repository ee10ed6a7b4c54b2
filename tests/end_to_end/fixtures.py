"""Fixtures that many modules have: a server that its tests share. The clients of it are in `conftest.py`."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.config.tenant import TenantConfig

from .harness import Served, configuration, serving
from .processes import Running, configure, running, running_plain, tenant
from .wire import SMALL, client, infer

Start = Callable[[Path], AbstractContextManager[Running]]


class Site:
    """A server and its configuration, which tests write again."""

    server: Running

    def __init__(self, folder: Path, repository: Path, always: str = "") -> None:
        """`always` is the end of each configuration."""
        self.folder = folder
        self.path = folder / "greenlane.toml"
        self.always = always
        self._repository = repository

    def write(self, *tables: str, **server: str) -> Path:
        """Tables in TOML, and keys of the server's section."""
        return configure(self.path, self._repository, "\n".join([*tables, self.always]), **server)

    def reload(self) -> httpx.Response:
        with client(self.server) as http:
            return http.post("/admin/reload")

    def ask(self, key: str, model: str = "identity", tenant: str = "") -> httpx.Response:
        """The answer to an inference with this key, on a connection of its own."""
        with client(self.server, tenant, Authorization=f"Bearer {key}") as http:
            return infer(http, model, SMALL)

    def status(self, key: str, model: str = "identity", tenant: str = "") -> int:
        """Its status; 0 for a connection that is lost."""
        try:
            return self.ask(key, model, tenant).status_code
        except httpx.TransportError:
            return 0


WAYS = ("asgi", "direct", "processes", "uvicorn")
"""The ways in which requests reach a server: in this process, under ASGI and without; and the two forms that users start."""


@contextmanager
def served_as(way: str, root: Path, folder: Path, **settings: Any) -> Iterator[Served | Running]:
    """A server whose only tenant, acme, may call everything in this repository; `folder` is for its configuration."""
    if way in ("asgi", "direct"):
        with serving(configuration(root, **settings), direct=way == "direct") as served:
            yield served
    else:
        given = {"default_tenant": "acme", **settings}
        path = configure(folder / "greenlane.toml", root, tenant(), **{key: json.dumps(value) for key, value in given.items()})
        with (running if way == "processes" else running_plain)(path) as server:
            yield server


def served_with(
    *tenants: TenantConfig | Callable[[], TenantConfig], fill: Callable[[Path], object] | None = None, **settings: Any
) -> Any:
    """A module's server of these tenants in the tests' process, under ASGI and then without.

    Its repository is the standard one, or one that `fill` writes.
    """

    @pytest.fixture(scope="module", params=[False, True], ids=["asgi", "direct"])
    def served(standard: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
        root = tmp_path_factory.mktemp("models") if fill else standard
        if fill:
            fill(root)
        made = [each() if callable(each) else each for each in tenants]
        with serving(configuration(root, *made, **settings), direct=request.param) as served:
            yield served

    return served


def server_with(tenants: str, *starts: Start, scope: str = "module", **settings: str) -> Any:
    """A module's server of processes, with the standard repository and these tenants; started so, one way after the other.

    Tests that kill one of its processes often have a server each: each time it is started again later, in 10 s at last.
    """

    @pytest.fixture(scope=scope, params=starts or [running], ids=lambda start: getattr(start, "__name__", ""))
    def server(standard: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Running]:
        path = configure(tmp_path_factory.mktemp("server") / "greenlane.toml", standard, tenants, **settings)
        with request.param(path) as server:
            yield server

    return server
