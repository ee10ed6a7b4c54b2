"""Graph modes of models on a GPU as configured; and plain `uvicorn server.app:app`."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engines.tensorrt.building.builder import BuildOptions
from server.config.schema import Config, DeviceConfig, ModelOptions, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from tests.end_to_end.harness import Served, serving

from .bench import MIB, assert_close, expected
from .networks import FEW, MORE, add, feed, mlp, plan
from .process import Client, running

pytestmark = pytest.mark.gpu

WAYS = {
    "usual": (ModelOptions(), "captured"),
    "required": (ModelOptions(graphs="required", copies="sm"), "captured"),
    "native": (ModelOptions(graphs="off", cuda_graphs="on"), "native"),
    "plain": (ModelOptions(graphs="off"), "none"),
    "sized": (ModelOptions(max_batch=8, warm_up=(1, 3, 8)), "captured"),
    "lazy": (ModelOptions(strategy="lazy", copies="sm"), "native"),
    "streamed": (ModelOptions(weight_budget=MIB), "none"),
    "two": (ModelOptions(), "captured"),
}
"""A model for each set of options, and which graphs it is to have."""

BUILT = {"streamed": BuildOptions(flags=("weight_streaming",)), "two": BuildOptions(profiles=(FEW, MORE))}
"""Those that are built in another way."""
REFUSED = {"weights": ModelOptions(profile=7)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, device: Any) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("models")
    made = plan(add(root, "usual"), mlp()).read_bytes()
    for name in (WAYS.keys() | REFUSED.keys()) - BUILT.keys() - {"usual"}:
        (add(root, name) / "model.plan").write_bytes(made)
    for name, options in BUILT.items():
        plan(add(root, name), mlp(), options)
    tenant = TenantConfig(name="acme", granules=4, models=("*",))
    config = Config(
        server=ServerConfig(default_tenant="acme", drain_grace=0.0),
        device=DeviceConfig(backend="cuda"),
        models=ModelsConfig(repository=root, options={name: options for name, (options, _) in WAYS.items()} | REFUSED),
        tenants={"acme": tenant},
        source="test",
    )
    with serving(config) as served:
        yield served


def assert_right(served: Served, name: str, rows: int, seed: int) -> None:
    x = feed(mlp(), {"x": (rows, 784)}, seed)
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": x["x"].shape, "data": x["x"].ravel().tolist()}]}
    (output,) = httpx.post(f"{served.url}/v2/models/{name}/infer", json=document).json()["outputs"]
    assert_close([np.array(output["data"], np.float32).reshape(output["shape"])], expected(mlp())(x))


@pytest.mark.parametrize("name", WAYS)
def test_a_model_runs_in_its_configured_graph_mode_with_right_outputs(served: Served, name: str) -> None:
    _, graphs = WAYS[name]
    config = httpx.get(f"{served.url}/v2/models/{name}/config").json()
    said = json.loads(config["parameters"]["greenlane.execution"]["string_value"])
    assert said["graphs"] == graphs
    assert (
        f'greenlane_model_graphs{{graphs="{graphs}",model="{name}",tenant="acme",version="1"}} 1.0'
        in httpx.get(f"{served.url}/metrics").text
    )
    for seed in range(6):
        assert_right(served, name, 1 + seed % 3, seed)


def test_streamed_weights_count_as_far_as_they_stay_on_the_gpu(served: Served) -> None:
    (tenant,) = httpx.get(f"{served.url}/admin/memory").json()["tenants"]
    weights = {model["name"]: model["bytes"]["weights"] for model in tenant["models"]}
    assert MIB <= weights["streamed"] < weights["usual"]


def test_requests_that_only_the_second_profile_holds_are_answered_by_it(served: Served) -> None:
    config = httpx.get(f"{served.url}/v2/models/two/config").json()
    assert json.loads(config["parameters"]["greenlane.execution"]["string_value"])["profiles"] == 2
    for rows in (8, 2, 3, 8):
        assert_right(served, "two", rows, seed=rows)


def test_an_unknown_profile_is_reported_in_the_index(served: Served) -> None:
    index = {entry["name"]: entry for entry in httpx.post(f"{served.url}/v2/repository/index").json()}
    assert index["weights"]["reason"] == "weights/1/model.plan: profile 7 is asked for, but it has 1, numbered from 0"


def test_plain_uvicorn_serves_two_tenants_and_warns_of_ignored_settings(gpu: None, tmp_path: Path) -> None:
    plan(add(tmp_path / "models", "mlp"), mlp())
    wanted = expected(mlp())
    running_plain = running(tmp_path, tmp_path / "models", "acme", "globex", plain=True)
    with running_plain as served, closing(Client(served.port)) as client:
        _ask_both(client, wanted)
    assert re.search(r"not all of greenlane.toml is honoured by uvicorn server.app:app:\n\s+tenants: ", served.log)
    if folder := os.environ.get("OUT"):
        (Path(folder) / "uvicorn.log").write_text(served.log, encoding="utf-8")


def _ask_both(client: Client, wanted: Any) -> None:
    for turn in range(200):
        x = feed(mlp(), {"x": (1 + turn % 8, 784)}, turn)
        assert_close(list(client.infer("mlp", ("acme", "globex")[turn % 2], x).values()), wanted(x))
