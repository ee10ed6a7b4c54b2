"""The server as a process of its own on a GPU: a client of Triton's, thousands of requests, broken plans, restarts."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.model_files.artifact import read_plan

from .bench import MIB, assert_close, expected, free_memory
from .networks import NETWORKS, feed, mlp, plan, resnet, several
from .process import Client, running

pytestmark = pytest.mark.gpu
TENANTS = ("acme", "globex")
MODELS = ("mlp", "several", "anysize")


def add(root: Path, name: str) -> Path:
    """Where the file of a new model's only version goes."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    return folder


def _break(root: Path, good: Path) -> None:
    """Models that cannot be served, each in its own way."""
    (add(root, "truncated") / "model.plan").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    (add(root, "bare") / "model.plan").write_bytes(bytes(read_plan(good).plan[:1000]))
    file = read_plan(good)
    assert file.artifact
    (add(root, "older") / "model.plan").write_bytes(replace(file.artifact, version="1.0.0.1").pack(file.plan))
    (add(root, "other") / "model.plan").write_bytes(replace(file.artifact, targets=("8.6",)).pack(file.plan))
    (add(root, "prose") / "model.plan").write_text("This is not a plan.")
    (add(root, "words") / "model.onnx").write_text("This is not a model.")


REASONS = {"truncated": "truncated", "bare": "load", "older": "1.0.0.1", "other": "8.6", "prose": "malformed", "words": "words"}
"""A part of each model's reason; of a plan that is no plan at all, the library's words."""


@pytest.fixture(scope="module")
def client(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("server")
    root = folder / "models"
    for name in MODELS:
        plan(add(root, name), NETWORKS[name]())
    _break(root, root / "mlp" / "1" / "model.plan")
    with running(folder, root, *TENANTS) as served, closing(Client(served.port)) as client:
        yield client


def test_broken_plans_are_unavailable_with_their_reasons_and_others_are_ready(client: Client, figures: dict[str, Any]) -> None:
    answer = client.ask("POST", "/v2/repository/index", b"{}")
    assert answer.status == 200
    index = {entry["name"]: entry for entry in json.loads(answer.body or b"")}
    figures["reasons of broken plans"] = {name: index[name].get("reason") for name in REASONS}
    assert {name for name, entry in index.items() if entry["state"] == "READY"} == set(MODELS)
    for name, part in REASONS.items():
        assert index[name]["state"] == "UNAVAILABLE"
        assert part in index[name]["reason"]
        assert client.ask("GET", f"/v2/models/{name}/ready").status != 200


@pytest.mark.parametrize("tenant", TENANTS)
def test_tritons_client_gets_the_outputs_of_onnx_runtime(client: Client, tenant: str) -> None:
    triton = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")
    with closing(triton.InferenceServerClient(f"127.0.0.1:{client.port}")) as theirs:
        headers = {"X-Tenant": tenant}
        assert theirs.is_server_ready(headers=headers)
        assert theirs.get_model_metadata("several", headers=headers)["platform"] == "tensorrt_plan"
        compare(triton, theirs, headers)


def compare(triton: Any, theirs: Any, headers: dict[str, str]) -> None:
    """Every shape, as JSON and in binary form."""
    network, names = several(), ("sum", "product", "both")
    wanted = expected(network)
    for binary, shapes in [(binary, shapes) for binary in (True, False) for shapes in network.tries]:
        arrays = feed(network, shapes, 1)
        inputs = [triton.InferInput(name, array.shape, "FP32") for name, array in arrays.items()]
        for given, array in zip(inputs, arrays.values(), strict=True):
            given.set_data_from_numpy(array, binary_data=binary)
        outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
        for _ in range(3):
            answer = theirs.infer(
                "several", inputs, outputs=outputs, headers=dict(headers)
            )  # `combine` adds to the kernels it has.
            assert_close([answer.as_numpy(name) for name in names], wanted(arrays))


@pytest.mark.alone
def test_10000_requests_of_every_shape_do_not_leak_device_memory(client: Client, device: Any, figures: dict[str, Any]) -> None:
    """Of three models and two tenants; the numbers are right from the first to the last."""
    cases = []
    for name in MODELS:
        network = NETWORKS[name]()
        wanted = expected(network)
        cases += [(name, arrays, wanted(arrays)) for arrays in (feed(network, shapes, 2) for shapes in network.tries)]

    def ask(count: int) -> None:
        for turn in range(count):
            name, arrays, theirs = cases[turn % len(cases)]
            ours = client.infer(name, TENANTS[turn // len(cases) % 2], arrays)
            if turn % 97 == 0:
                assert_close(list(ours.values()), theirs)

    ask(1_000)
    before = free_memory(device)
    ask(10_000)
    lost = before - free_memory(device)
    figures["device memory lost in 10,000 requests, MiB"] = lost / MIB
    assert lost <= 2 * MIB


RESTART = """
import sys, time
from engines import load_engine
from partitions import open_device

device = open_device("cuda")
partition = device.carve(range(6))
engine = load_engine(sys.argv[1], device)
began = time.perf_counter()
executor = engine.bind(partition)
print(time.perf_counter() - began)
executor.close()
engine.close()
partition.close()
device.close()
"""


@pytest.mark.alone
def test_compiled_kernels_are_cached_across_a_restart(gpu: None, tmp_path: Path, figures: dict[str, Any]) -> None:
    path = plan(tmp_path, resnet())

    def bind() -> float:
        done = subprocess.run([sys.executable, "-c", RESTART, path], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    first = bind()
    cache = path.with_name("model.plan.cache")
    assert cache.stat().st_size > 10_000
    seconds = [bind() for _ in range(2)]
    figures["binding resnet with no kernels, and in two later processes, s"] = [first, *seconds]
    assert min(seconds) < 0.8 * first
    cache.unlink()
    assert bind() > min(seconds)


def test_outputs_are_the_same_alone_and_under_concurrent_load(client: Client) -> None:
    """Both tenants ask at once, each on a connection of its own."""
    from concurrent.futures import ThreadPoolExecutor

    network = mlp()
    wanted = expected(network)

    def ask(tenant: str) -> list[np.ndarray]:
        with closing(Client(client.port)) as own:
            return [own.infer("mlp", tenant, feed(network, {"x": (1 + n % 8, 784)}, n))["y"] for n in range(300)]

    with ThreadPoolExecutor(2) as threads:
        for answers in threads.map(ask, TENANTS):
            for n, answer in enumerate(answers):
                assert_close([answer], wanted(feed(network, {"x": (1 + n % 8, 784)}, n)))
