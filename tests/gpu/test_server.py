"""The whole server on green contexts: tenants, HTTP, live repartition."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from server.config.schema import Config, DeviceConfig, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from tests.end_to_end.harness import Served, serving

from .bench import expected
from .networks import add, mlp, plan, several

pytestmark = pytest.mark.gpu


@contextmanager
def server(root: Path) -> Iterator[Served]:
    """Two tenants that may both call all models of this repository."""
    tenants = [TenantConfig(name=name, granules=4, models=("*",)) for name in ("acme", "globex")]
    config = Config(
        server=ServerConfig(default_tenant="acme", drain_grace=0.0),
        device=DeviceConfig(backend="cuda"),
        models=ModelsConfig(repository=root),
        tenants={tenant.name: tenant for tenant in tenants},
        source="test",
    )
    with serving(config) as served:
        yield served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, device: Any) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("models")
    plan(add(root, "mlp"), mlp())
    plan(add(root, "several"), several())
    (add(root, "onnx") / "model.onnx").write_bytes(mlp().onnx)
    with server(root) as served:
        yield served


def test_every_model_is_ready_including_one_built_from_onnx(served: Served) -> None:
    index = httpx.post(f"{served.url}/v2/repository/index").json()
    assert {(entry["name"], entry["state"]) for entry in index} == {
        ("mlp", "READY"),
        ("several", "READY"),
        ("onnx", "READY"),
    }, index
    assert httpx.get(f"{served.url}/v2/models/mlp").json()["platform"] == "tensorrt_plan"


def test_a_shape_outside_the_profile_is_refused_with_its_range(served: Served) -> None:
    x = {"name": "x", "shape": [9, 784], "datatype": "FP32", "data": [0.0] * 784 * 9}
    answer = httpx.post(f"{served.url}/v2/models/mlp/infer", json={"inputs": [x]})
    assert answer.status_code == 400
    assert "the engine was built for 1 to 8" in answer.json()["error"]


def test_2000_requests_of_random_shapes_during_200_repartitions(tmp_path: Path, device: Any) -> None:
    """With a single model, since every repartition binds all models again and runs them in all their usual shapes."""
    plan(add(tmp_path, "several"), several())
    with server(tmp_path) as served:
        assert asyncio.run(moved_under_load(served)) >= 200
        probe = httpx.post(f"{served.url}/admin/partitions/probe", timeout=60).json()
    assert probe["overlaps"] == []
    assert all(len(partition["located"]) == partition["size"] for partition in probe["partitions"].values())


async def moved_under_load(served: Served) -> int:
    """Ask 2,000 times, and repartition for as long; how often that was."""
    wanted = expected(several())
    chance = np.random.default_rng(3)
    done = asyncio.Event()

    async def ask(http: httpx.AsyncClient, tenant: str, count: int) -> None:
        for _ in range(count):
            n = int(chance.integers(1, 17))
            a, b = chance.random((n, 64), np.float32), chance.random((n, 16), np.float32)
            inputs = [
                {"name": name, "shape": array.shape, "datatype": "FP32", "data": array.ravel().tolist()}
                for name, array in (("a", a), ("b", b))
            ]
            answer = await http.post("/v2/models/several/infer", json={"inputs": inputs}, headers={"X-Tenant": tenant})
            assert answer.status_code == 200, answer.text
            for output, theirs in zip(answer.json()["outputs"], wanted({"a": a, "b": b}), strict=True):
                ours = np.array(output["data"], np.float32).reshape(output["shape"])
                assert np.abs(ours - theirs).max() <= 2e-2 * np.abs(theirs).max()

    async def move(http: httpx.AsyncClient) -> int:
        moves = 0
        while not (done.is_set() and moves >= 200):
            counts = {"acme": int(chance.integers(1, 9)), "globex": int(chance.integers(1, 8))}
            answer = await http.put("/admin/partitions", json=counts)
            assert answer.status_code == 200, answer.text
            moves += 1
        return moves

    async with httpx.AsyncClient(base_url=served.url, timeout=120) as http:
        moving = asyncio.ensure_future(move(http))
        await asyncio.gather(*(ask(http, tenant, 250) for tenant in ("acme", "globex") * 4))
        done.set()
        return await moving
