"""Budgets of device memory over HTTP, with real models on cores: many in a third of their memory, and faults meanwhile.

On cores each tenant's process has its models; with a device process they are across the wall, as on a GPU.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engines import load_engine
from partitions.cpu import open_cpu

from .harness import cores
from .processes import Load, Running, configure, running, running_device, tenant
from .repository import IDENTITY, SPIN, write
from .wire import FOREVER, Connection, client, index, infer, lane, posted, request, spin, tensor, until

COUNT = int(os.environ.get("GREENLANE_PAGED_MODELS", "20"))
SECONDS = float(os.environ.get("GREENLANE_PAGING_SECONDS", "4"))
SIDE = 300
"""Each model multiplies by a matrix of so many rows and columns: 360 kB."""
pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")


def add_matrix(root: Path, number: int) -> None:
    """Model m{number}: all elements of its matrix are its number."""
    weights = numpy_helper.from_array(np.full((SIDE, SIDE), number, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "matrix",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", SIDE])],
        [weights],
    )
    path = root / f"m{number}" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def ask(http: httpx.Client, number: int, **parameters: Any) -> httpx.Response:
    return infer(http, f"m{number}", request(tensor("x", "FP32", [1, SIDE], [1.0] * SIDE), parameters=parameters))


def is_right(answer: httpx.Response, number: int) -> bool:
    return answer.status_code == 200 and answer.json()["outputs"][0]["data"] == [float(SIDE * number)] * SIDE


def memory(http: httpx.Client, tenant: str = "acme") -> dict[str, Any]:
    return next(each for each in http.get("/admin/memory").json()["tenants"] if each["name"] == tenant)


def resident(http: httpx.Client) -> list[str]:
    return sorted(each["name"] for each in memory(http)["models"] if not each["paged"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    write(found, "identity", IDENTITY)
    for number in range(1, COUNT + 1):
        add_matrix(found, number)
    return found


@pytest.fixture(scope="module")
def limit(root: Path) -> int:
    """A third of what all matrices take together."""
    return COUNT * size_of(root / "m1" / "1" / "model.onnx") // 3


def size_of(path: Path) -> int:
    """Bytes of memory that this model takes."""
    with ExitStack() as stack:
        device = stack.enter_context(closing(open_cpu()))
        partition = stack.enter_context(closing(device.carve([0])))
        engine = stack.enter_context(closing(load_engine(path)))
        executor = stack.enter_context(closing(engine.bind(partition)))
        return sum(engine.memory.values()) + sum(executor.memory.values())


@contextmanager
def serving(
    root: Path, folder: Path, run: Callable[[Path], AbstractContextManager[Running]], limit: int, paging: bool = True
) -> Iterator[tuple[Running, httpx.Client]]:
    tenants = tenant(device_memory=limit, paging=paging) + tenant("globex", "identity")
    config = configure(folder / "greenlane.toml", root, tenants)
    with run(config) as server, client(server, "acme") as http:
        until(lambda: http.get("/v2/health/ready").status_code == 200)
        yield server, http


@pytest.fixture(scope="module", params=[running, running_device], ids=["own process", "device process"])
def paging(
    root: Path, limit: int, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Running, httpx.Client]]:
    with serving(root, tmp_path_factory.mktemp("paging"), request.param, limit) as found:
        yield found


@pytest.fixture
def server(paging: tuple[Running, httpx.Client]) -> Running:
    return paging[0]


@pytest.fixture
def http(paging: tuple[Running, httpx.Client]) -> httpx.Client:
    return paging[1]


def test_many_models_in_a_third_of_their_memory(server: Running, http: httpx.Client) -> None:
    assert 2 <= len(resident(http)) < COUNT // 2
    wrong: list[str] = []
    end = time.monotonic() + SECONDS
    asked = 0

    def one_client(seed: int) -> None:
        nonlocal asked
        choose = random.Random(seed)
        with client(server, "acme") as mine:
            while time.monotonic() < end:
                number = choose.randint(1, COUNT)
                answer = ask(mine, number)
                asked += 1
                if not is_right(answer, number):
                    wrong.append(f"m{number}: {answer.status_code} {answer.text[:200]}")

    most = 0
    with Load(server, "globex") as neighbour, ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(one_client, seed) for seed in range(2)]
        while not all(each.done() for each in clients):
            most = max(most, memory(http)["used"])
            neighbour.more()
        for each in clients:
            each.result()
    found = memory(http)
    assert wrong == []
    assert neighbour.wrong == []
    assert 0 < most <= found["device_memory"]
    assert found["page_ins"] > 5
    assert asked > found["page_ins"]


def test_a_model_that_is_paged_out_is_ready_and_keeps_deadlines(http: httpx.Client) -> None:
    number = next(number for number in range(1, COUNT + 1) if f"m{number}" not in resident(http))
    name, found = f"m{number}", {each["name"]: each for each in index(http)}
    assert found[name] == {"name": name, "version": "1", "state": "READY", "reason": "paged out"}
    assert http.get(f"/v2/models/{name}/ready").status_code == 200
    assert http.get(f"/v2/models/{name}").json()["inputs"][0]["name"] == "x"
    assert ask(http, number, timeout=1).status_code == 504
    assert is_right(ask(http, number), number)
    assert name in resident(http)
    assert f'greenlane_model_paged_out{{model="{name}",tenant="acme",version="1"}} 0.0' in http.get("/metrics").text
    other = next(each for each in range(1, COUNT + 1) if f"m{each}" not in resident(http))
    for change in ("unload", "load"):
        assert http.post(f"/v2/repository/models/m{other}/{change}").status_code == 200
    assert f"m{other}" in resident(http)
    assert is_right(ask(http, other), other)


def test_after_its_process_was_killed_all_models_are_served_again(server: Running, http: httpx.Client, limit: int) -> None:
    stop = threading.Event()

    def ask_all() -> None:
        while not stop.is_set():
            with client(server, "acme") as mine, suppress(httpx.HTTPError):
                for number in range(1, COUNT + 1):
                    ask(mine, number)

    asking = threading.Thread(target=ask_all)
    asking.start()
    try:
        until(lambda: memory(http)["page_ins"] > 0)
        server.kill("dev 0" if server.pids("dev 0") else "acme")
    finally:
        stop.set()
        asking.join()
    with client(server, "acme") as mine:
        for number in range(1, COUNT + 1):
            until(lambda number=number: is_right(ask(mine, number), number))  # type: ignore[misc]
        assert memory(mine)["used"] <= limit


def test_a_replaced_http_process_shows_what_is_paged_out(server: Running) -> None:
    if not server.pids("dev 0"):
        pytest.skip("its models end with it, which the test above covers")
    with client(server, "acme") as mine:
        before = _paged(mine)
        assert before
        assert not before & set(resident(mine))
    server.kill("acme")
    until(lambda: _paged_now(server) == before)
    with client(server, "acme") as mine:
        assert is_right(ask(mine, 1), 1)


def _paged(http: httpx.Client) -> set[str]:
    return {each["name"] for each in index(http) if each.get("reason") == "paged out"}


def _paged_now(server: Running) -> set[str]:
    with suppress(httpx.HTTPError, TypeError, AttributeError), client(server, "acme") as mine:
        return _paged(mine)
    return set()


def test_without_paging_a_model_is_left_out_and_refused_with_the_arithmetic(root: Path, limit: int, tmp_path: Path) -> None:
    with serving(root, tmp_path, running, limit, False) as (_, http):
        found = {each["name"]: each for each in index(http)}
        served = [name for name, each in found.items() if each["state"] == "READY"]
        assert 2 <= len(served) < COUNT // 2
        left_out = next(name for name, each in found.items() if each["state"] == "UNAVAILABLE")
        answer = http.post(f"/v2/repository/models/{left_out}/load")
        assert answer.status_code == 400
        assert "of device memory (" in answer.json()["error"]
        assert answer.json()["error"].endswith("or set tenants.acme.paging")
        assert ask(http, int(left_out[1:])).status_code == 503
        for name in served[:2]:
            assert http.post(f"/v2/repository/models/{name}/unload").status_code == 200
        assert http.post(f"/v2/repository/models/{left_out}/load").status_code == 200
        assert is_right(ask(http, int(left_out[1:])), int(left_out[1:]))


@pytest.mark.parametrize("run", [running, running_device], ids=["own process", "device process"])
def test_a_tenant_that_goes_is_answered_by_models_that_still_have_to_make_room(
    run: Callable[[Path], AbstractContextManager[Running]], tmp_path: Path
) -> None:
    """There is room for spin or m1, and m1 waits; spin is given up once the reload has begun."""
    models = tmp_path / "models"
    add_matrix(models, 1)
    write(models, "spin", SPIN)
    write(models, "identity", IDENTITY)
    for name in ("m1", "spin"):
        model = onnx.load(path := models / name / "1" / "model.onnx")
        model.doc_string = "large" * 10**6
        onnx.save(model, path)
    with serving(models, tmp_path, run, 20 * 10**6) as (server, http), ThreadPoolExecutor(2) as threads:
        assert infer(http, "spin", spin(1)).status_code == 200
        with Connection(server) as spinning, client(server, "globex") as admin, client(server, "acme") as mine:
            spinning.send(posted("spin", spin(FOREVER), "X-Tenant: acme"))
            until(lambda: lane(admin, "acme")["in_flight"] == 1)
            asked = threads.submit(ask, mine, 1)
            until(lambda: lane(admin, "acme")["in_flight"] == 2)
            configure(tmp_path / "greenlane.toml", models, tenant("globex", "identity"), drain_timeout='"60s"')
            reloading = threads.submit(admin.post, "/admin/reload", timeout=60)
            until(lambda: "acme" not in admin.get("/admin/partitions").json()["partitions"])
            spinning.close()
            assert is_right(asked.result(), 1)
            assert reloading.result().status_code == 200
