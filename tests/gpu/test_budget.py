"""What models take of a GPU's memory, by arithmetic and by the driver; and 20 models in a third of it, over HTTP."""

import functools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engines import load_engine
from engines.memory import added
from server.config.schema import Config, DeviceConfig, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from tests.end_to_end.harness import Served, serving

from .bench import expected
from .conftest import Figures
from .networks import Network, add, encoder, mlp, plan, resnet
from .test_partitions import MIB, free_memory

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

BESIDE = 64 * MIB
"""How much more the driver may give than the arithmetic says: graphs, kernels, events, and whole pages for small buffers."""
POOLED = 2 * MIB
"""How much less a copy, besides its weights: memory comes in pages, and weights from pieces of 32 MiB that the copy before, or
another model, has not used up."""
COPIES = 3
COUNT = 20
SECONDS = 20.0


@pytest.mark.parametrize("network", [mlp(), resnet(), encoder()], ids=["mlp", "resnet", "encoder"])
def test_the_arithmetic_is_what_the_driver_gave(device: Any, tmp_path: Path, figures: Figures, network: Network) -> None:
    path = plan(add(tmp_path, "model"), network)
    with ExitStack() as made:
        partition = made.enter_context(closing(device.carve([0])))

        def load() -> tuple[Any, Any]:
            engine = made.enter_context(closing(load_engine(path, device)))
            return engine, made.enter_context(closing(engine.bind(partition)))

        load()  # Libraries and kernels take memory the first time, and the driver keeps what is freed: this one stays open.
        before = free_memory(device)
        for _ in range(COPIES):
            engine, executor = load()
        took = (before - free_memory(device)) // COPIES
        said, estimate = added([engine.memory, executor.memory]), dict(engine.executor_memory)
        in_fact = sum(executor.memory.values())
    name = path.parent.name + str(len(network.onnx))
    figures.setdefault("budget", {})[name] = {"said": said, "estimate": estimate, "driver": took}
    least = sum(said.values()) - said["weights"]
    assert least - POOLED <= took <= sum(said.values()) + BESIDE
    assert sum(estimate.values()) <= in_fact


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    for number in range(COUNT):
        plan(add(found, f"m{number}"), mlp())
    plan(add(found, "own"), mlp())
    return found


def configuration(root: Path, limit: int | None) -> Config:
    tenants = [
        TenantConfig(
            name="acme",
            granules=4,
            models=tuple(f"m{number}" for number in range(COUNT)),
            device_memory=limit,
            paging=limit is not None,
        ),
        TenantConfig(name="globex", granules=4, models=("own",)),
    ]
    return Config(
        server=ServerConfig(default_tenant="acme", drain_grace=0.0),
        device=DeviceConfig(backend="cuda"),
        models=ModelsConfig(repository=root),
        tenants={tenant.name: tenant for tenant in tenants},
        source="test",
    )


@pytest.fixture(scope="module")
def served(root: Path, device: Any) -> Iterator[Served]:
    with serving(configuration(root, None)) as served:
        whole = httpx.get(f"{served.url}/admin/memory").json()["tenants"][0]["used"]
    with serving(configuration(root, whole // 3)) as served:
        yield served


RIGHT = functools.cache(lambda: expected(mlp()))
"""Computes the outputs of every model."""


def ask(http: httpx.Client, model: str, seed: int) -> bool:
    """Whether the answer is right."""
    x = np.random.default_rng(seed).random((1, 784), np.float32)
    inputs = {"name": "x", "shape": [1, 784], "datatype": "FP32", "data": x.ravel().tolist()}
    answer = http.post(f"/v2/models/{model}/infer", json={"inputs": [inputs]})
    if answer.status_code != 200:
        return False
    (right,) = RIGHT()({"x": x})
    return bool(np.allclose(np.array(answer.json()["outputs"][0]["data"]), right.ravel(), rtol=1e-2, atol=1e-2))


def test_twenty_models_in_a_third_of_their_memory_and_the_neighbours_latency(served: Served, figures: Figures) -> None:
    wrong: list[str] = []
    latencies: dict[str, list[float]] = {"quiet": [], "paging": []}
    stop, phase = threading.Event(), "quiet"

    def neighbour() -> None:
        with httpx.Client(base_url=served.url, headers={"X-Tenant": "globex"}, timeout=60) as http:
            while not stop.is_set():
                began = time.perf_counter()
                if not ask(http, "own", 1):
                    wrong.append("own")
                latencies[phase].append(time.perf_counter() - began)

    def client(seed: int) -> None:
        choose, until = random.Random(seed), time.monotonic() + SECONDS
        with httpx.Client(base_url=served.url, headers={"X-Tenant": "acme"}, timeout=60) as http:
            while time.monotonic() < until:
                model = f"m{choose.randrange(COUNT)}"
                if not ask(http, model, seed):
                    wrong.append(model)

    with ThreadPoolExecutor(3) as threads, httpx.Client(base_url=served.url) as http:
        beside = threads.submit(neighbour)
        time.sleep(SECONDS / 4)
        phase = "paging"
        clients = [threads.submit(client, seed) for seed in range(2)]
        most = 0
        while not all(each.done() for each in clients):
            most = max(most, http.get("/admin/memory").json()["tenants"][0]["used"])
        stop.set()
        for each in (beside, *clients):
            each.result()
        found = http.get("/admin/memory").json()["tenants"][0]
    assert wrong == []
    assert 0 < most <= found["device_memory"]
    assert found["page_ins"] > 10
    figures["paging"] = {
        "page_in_ms": 1e3 * found["page_in_seconds"] / found["page_ins"],
        "page_out_ms": 1e3 * found["page_out_seconds"] / found["page_outs"],
        **{f"neighbour, {name}: p99 ms": 1e3 * float(np.quantile(each, 0.99)) for name, each in latencies.items()},
    }
