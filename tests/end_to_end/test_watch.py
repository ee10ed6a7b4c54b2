"""A repository that is watched while it is served: `models.watch`."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import repository
from .processes import Load, Running, configure, running, running_plain, tenant
from .wire import SMALL, client, infer, until

TENANTS = 'watch = "100ms"\npython = true\n' + tenant()
DOUBLING = "def preprocess(inputs):\n    return {'x': 2 * inputs['x']}\n"
FORMS: dict[str, Any] = {"uvicorn": running_plain, "processes": running}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    repository.write(tmp_path / "models", "identity", repository.IDENTITY)
    return tmp_path / "models"


@pytest.fixture(params=FORMS)
def server(root: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    with FORMS[request.param](configure(root.parent / "greenlane.toml", root, TENANTS)) as server:
        yield server


def index(http: httpx.Client, name: str) -> dict[str, str]:
    """What the index says of a model, by version: READY, or why not."""
    entries = http.post("/v2/repository/index").json()
    return {e.get("version", ""): e.get("reason", e["state"]) for e in entries if e["name"] == name}


def test_models_come_change_and_go_and_no_request_fails(root: Path, server: Running) -> None:
    with client(server, "acme") as http:
        until(lambda: http.get("/v2/health/ready").status_code == 200)
        with Load(server, "acme") as load:
            repository.write(root, "identity", repository.IDENTITY, version=2)
            until(lambda: index(http, "identity") == {"2": "READY"})
            load.more()
            good = repository.write(root, "new", repository.IDENTITY, config="max_batch_size: 2")
            until(lambda: index(http, "new") == {"1": "READY"})
            assert http.get("/v2/models/new/config").json()["max_batch_size"] == 2
            (root / "new" / "config.pbtxt").write_text("max_batch_size: 4")
            until(lambda: http.get("/v2/models/new/config").json()["max_batch_size"] == 4)
            bad = root / "identity" / "3" / "model.onnx"
            bad.parent.mkdir()
            bad.write_bytes(good.read_bytes()[:-20])
            until(lambda: "3" in index(http, "identity"))
            found = index(http, "identity")
            assert found["2"] == "READY"
            assert found["3"].startswith("identity/3/model.onnx: failed to load: ")
            assert http.get("/v2/health/ready").status_code == 200
            load.more()
            bad.write_bytes(good.read_bytes())
            until(lambda: index(http, "identity") == {"3": "READY"})
            (root / "new" / "model.py").write_text(DOUBLING)
            until(lambda: infer(http, "new", SMALL).json()["outputs"][0]["data"] == [2, 4])
            shutil.rmtree(root / "new")
            until(lambda: http.get("/v2/models/new/ready").status_code == 404)
            load.more()
        assert load.wrong == []


@pytest.mark.parametrize("form", FORMS)
def test_a_reload_begins_to_watch_and_ends_it(root: Path, form: str) -> None:
    path = configure(root.parent / "greenlane.toml", root, TENANTS.replace('"100ms"', "false"), default_tenant='"acme"')
    with FORMS[form](path) as server, client(server) as http:
        repository.write(root, "identity", repository.IDENTITY, version=2)
        for old, new in (("false", '"100ms"'), ('"100ms"', "false")):
            path.write_text(path.read_text().replace(f"watch = {old}", f"watch = {new}"))
            answer = http.post("/admin/reload")
            assert (answer.status_code, [each["key"] for each in answer.json()["changed"]]) == (200, ["models.watch"])
            until(lambda: index(http, "identity") == {"2": "READY"})
