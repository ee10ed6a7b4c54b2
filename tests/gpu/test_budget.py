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
from engines.memory import added, shared_memory
from server.config.schema import Config, DeviceConfig, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from tests.end_to_end.harness import Served, serving

from .bench import expected, own_memory
from .conftest import Figures
from .networks import Network, add, encoder, mlp, plan, resnet
from .test_partitions import MIB, free_memory

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

BESIDE = 16 * MIB
"""How much more the driver may give than the arithmetic says: streams, events, whole pages for small buffers, and the rest
of the piece of 32 MiB in which the weights of the last copy are.
"""
STEP = 2 * MIB
"""The least that the driver takes. What it places in the rest of a step does not show."""
LOOKS = 200
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
        before, own, pool, kept = free_memory(device), own_memory(device), pooled(device), device.driver_memory.kept
        copies = [load() for _ in range(COPIES)]
        took, from_pool, own = before - free_memory(device), pooled(device) - pool, own_memory(device) - own
        again = kept - device.driver_memory.kept
        parts = [taken(engine, executor) for engine, executor in copies]
        said, estimate = added(parts), dict(copies[0][0].executor_memory)
        in_fact = sum(copies[0][1].memory.values())
        unmeasured = [driver_memory(executor).get("unmeasured", 0) for _, executor in copies]
    name = path.parent.name + str(len(network.onnx))
    figures.setdefault("budget", {})[name] = {
        "each": parts,
        "estimate": estimate,
        "driver": took // COPIES,
        "of this process, by NVML": own // COPIES,
        "of that from the pool": from_pool // COPIES,
        "in what the driver had kept": again // COPIES,
        "unmeasured": unmeasured,
    }
    assert unmeasured == [0] * COPIES
    whole = sum(said.values()) - again
    assert whole - said["weights"] - POOLED * COPIES <= took <= whole + BESIDE * COPIES
    assert sum(estimate.values()) <= in_fact


@pytest.mark.parametrize("network", [mlp(), resnet(), encoder()], ids=["mlp", "resnet", "encoder"])
def test_graphs_of_alternates_are_what_the_driver_gave(device: Any, tmp_path: Path, figures: Figures, network: Network) -> None:
    """Several, as one alone may find room in what the driver has."""
    path = plan(add(tmp_path, "model"), network)
    with ExitStack() as made:
        places = [made.enter_context(closing(device.carve([granule]))) for granule in range(COPIES + 1)]
        engine = made.enter_context(closing(load_engine(path, device)))
        home = made.enter_context(closing(engine.bind(places[0])))
        before, own, kept = free_memory(device), own_memory(device), device.driver_memory.kept
        others = [made.enter_context(closing(home.alternate(place))) for place in places[1:]]
        took, own, again = before - free_memory(device), own_memory(device) - own, kept - device.driver_memory.kept
        adds = [dict(other.describe()["adds"]) for other in others]
        unmeasured = sum(driver_memory(other).get("unmeasured", 0) for other in others)
    name = path.parent.name + str(len(network.onnx))
    figures.setdefault("graphs", {})[name] = {
        "adds": adds,
        "driver": took,
        "of this process, by NVML": own,
        "kept": again,
        "unmeasured": unmeasured,
    }
    assert unmeasured == 0
    assert set().union(*adds) <= {"graphs"}
    assert abs(took - (sum(added(adds).values()) - again)) <= STEP * COPIES


def test_a_model_that_moves_or_is_loaded_again_takes_what_it_took(device: Any, tmp_path: Path, figures: Figures) -> None:
    """The driver keeps what is freed, or gives it back to the device: the account is the same, but for rests of its steps.

    What its graphs took is for people to look at: the first may have found room in the rest of a step.
    """
    path = plan(add(tmp_path, "model"), resnet())
    seen: list[dict[str, int]] = []
    with ExitStack() as made:
        places = [made.enter_context(closing(device.carve([granule]))) for granule in range(4)]
        for _ in range(2):
            with closing(load_engine(path, device)) as engine:
                executor = engine.bind(places[0])
                for place in (*places[1:], None):
                    seen.append({kind: n for kind, n in taken(engine, executor).items() if kind in ("kernels", "graphs")})
                    moved = executor.rebind(place) if place else None
                    executor.close()
                    executor = moved
    kept = device.driver_memory.kept
    figures["driver memory, moved three times and loaded again"] = {"seen": seen, "kept": kept}
    kernels = [each.get("kernels", 0) for each in seen]
    assert max(kernels) - min(kernels) <= STEP


@pytest.mark.parametrize("whose", ["own", "all"])
def test_how_long_the_driver_takes_to_say_what_is_free(device: Any, tmp_path: Path, figures: Figures, whose: str) -> None:
    """In a quiet process, and beside a thread that loads kernels, which holds a lock of the driver."""
    from partitions.cuda.memory_level import find_own, level
    from partitions.cuda.nvml import open_nvml

    loaded, looks = threading.Event(), list[float]()
    device.make_current()
    own = find_own(open_nvml(device.address)) if whose == "own" else None
    assert (own is not None) == (whose == "own")

    def look() -> float:
        """Milliseconds."""
        began = time.perf_counter()
        assert level(device.index, own) is not None
        return 1e3 * (time.perf_counter() - began)

    path = plan(add(tmp_path, "model"), resnet())

    def load() -> None:
        try:
            with (
                closing(device.carve([1])) as place,
                closing(load_engine(path, device)) as engine,
                closing(engine.bind(place)),
            ):
                pass
        finally:
            loaded.set()

    quiet = [look() for _ in range(LOOKS)]
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(load)
        while not loaded.is_set():
            looks.append(look())
        loading.result()
    figures[f"asking for the level of memory, {whose}, ms"] = {
        name: {"count": len(each), "median": float(np.median(each)), "p99": float(np.quantile(each, 0.99)), "max": max(each)}
        for name, each in {"quiet": quiet, "loading": looks}.items()
    }
    assert float(np.median(quiet)) < 1.0


def taken(engine: Any, executor: Any) -> dict[str, int]:
    """All that counts in a budget."""
    return added([engine.memory, executor.memory, *shared_memory(executor).values()])


def driver_memory(executor: Any) -> dict[str, int]:
    return dict(executor.describe().get("driver_memory", {}))


def pooled(device: Any) -> int:
    """The bytes that the memory pool has taken of the device."""
    from cuda.bindings import driver

    attribute = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
    with device.current():
        pool = handle_return(driver.cuDeviceGetMemPool(device.index))
        return int(handle_return(driver.cuMemPoolGetAttribute(pool, attribute)))


def handle_return(result: Any) -> Any:
    from partitions.cuda import driver

    return driver.handle_return(result)


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

    with ThreadPoolExecutor(3) as threads, httpx.Client(timeout=60, base_url=served.url) as http:
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
