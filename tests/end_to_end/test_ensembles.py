"""Ensembles over the wire with Triton's client: on cores, and on a simulated GPU in one graph."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from server.config.tenant import TenantConfig
from tests.engines.small import model
from tests.simulation import Gpu, installed
from tests.simulation.plans import make_plan
from tests.simulation.tensorrt import library

from . import repository
from .harness import ARENA, Served, configuration, serving
from .virtual import VirtualDevice
from .wire import client as client_to

DOUBLE = "double (float[n, 3] x) => (float[n, 3] y) { y = Add(x, x) }"
LESS = "less (float[m, 3] a) => (float[m, 3] b) <float three = {3}> { b = Sub(a, three) }"
SUM = "sum (float[k, 3] left, float[k, 3] right) => (float[k, 3] sum) { sum = Add(left, right) }"
MODELS = {"double": (DOUBLE, ("x",)), "less": (LESS, ("a",)), "sum": (SUM, ("left", "right"))}

BATCHED = "max_batch_size: 8"
CONFIG = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 3 ] } ]
ensemble_scheduling {
  step [
    { model_name: "sum" model_version: -1
      input_map { key: "left" value: "small" } input_map { key: "right" value: "IN" }
      output_map { key: "sum" value: "OUT" } },
    { model_name: "double" input_map { key: "x" value: "IN" } output_map { key: "y" value: "big" } },
    { model_name: "less" input_map { key: "a" value: "big" } output_map { key: "b" value: "small" } }
  ]
}
"""
"""2 x - 3 + x; its steps are not in the order in which they run."""


def write(root: Path, name: str, text: str, gpu: bool) -> None:
    if gpu:
        inputs = next(inputs for known, (_, inputs) in MODELS.items() if known == name)
        path = root / name / "1" / "model.plan"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_plan(model(text), {each: [(1, 3), (2, 3), (8, 3)] for each in inputs}))
        (root / name / "config.pbtxt").write_text(BATCHED)
    else:
        repository.write(root, name, text, config=BATCHED)


def ensemble(root: Path, config: str = CONFIG, name: str = "all") -> None:
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(config)


@contextmanager
def served_by(kind: str, root: Path) -> Iterator[Served]:
    """Two tenants may call everything, one of them not all steps. A simulated GPU is its attribute `gpu`."""
    tenants = [TenantConfig(name=name, granules=1, models=("*",), memory=ARENA) for name in ("acme", "globex")]
    tenants.append(TenantConfig(name="poor", granules=1, models=("all", "double", "less"), memory=ARENA))
    if kind == "cores":
        with serving(configuration(root, *tenants), VirtualDevice(4)) as served:
            yield served
    else:
        gpu = Gpu()
        with installed(gpu, library(gpu)) as cuda, serving(configuration(root, *tenants), cuda.open_cuda(Gpu.index)) as served:
            served.gpu = gpu
            yield served


@pytest.fixture(scope="module", params=["cores", "gpu"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


on_cores = pytest.mark.parametrize("kind", ["cores"], indirect=True)
"""What happens does not depend on where models run."""


def fill(root: Path, kind: str) -> None:
    for name, (text, _) in MODELS.items():
        write(root, name, text, kind == "gpu")
    ensemble(root)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    root = tmp_path_factory.mktemp("models")
    fill(root, kind)
    return root


@pytest.fixture(scope="module")
def served(root: Path, kind: str) -> Iterator[Served]:
    with served_by(kind, root) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.address, concurrency=4) as client:
        yield client


@pytest.fixture
def changing(root: Path, kind: str, client: triton.InferenceServerClient) -> Iterator[triton.InferenceServerClient]:
    """A client that changes models, which are then as before."""
    yield client
    fill(root, kind)
    for name in (*MODELS, "all"):
        client.load_model(name)


def rows(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(-50, 50, (count, 3)).astype(np.float32)


def ask(client: triton.InferenceServerClient, data: Any, name: str = "all", tenant: str = "acme") -> Any:
    tensor = triton.InferInput("IN", list(data.shape), "FP32")
    tensor.set_data_from_numpy(data)
    return client.infer(name, [tensor], headers={"X-Tenant": tenant}).as_numpy("OUT")


def refused(client: triton.InferenceServerClient, name: str = "all", tenant: str = "acme") -> str:
    with pytest.raises(InferenceServerException) as error:
        ask(client, rows(1), name, tenant)
    return f"{error.value.status()}: {error.value.message()}"


def states(client: triton.InferenceServerClient) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in client.get_model_repository_index()}


def test_an_ensemble_answers_as_its_steps_do_one_after_another(client: triton.InferenceServerClient) -> None:
    assert client.is_model_ready("all")
    for count in (1, 2, 3, 8):
        data = rows(count, count)
        assert ask(client, data).tolist() == (3 * data - 3).tolist()
    with pytest.raises(InferenceServerException, match=r"batch of 9|9; the engine was built for 1 to 8"):
        ask(client, rows(9))


def test_metadata_and_configuration_are_those_of_triton(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata("all")
    assert (metadata["platform"], metadata["versions"]) == ("ensemble", ["1"])
    assert metadata["inputs"] == [{"name": "IN", "datatype": "FP32", "shape": [-1, 3]}]
    config = client.get_model_config("all")
    assert (config["platform"], config["backend"], config["max_batch_size"]) == ("ensemble", "", 8)
    steps = config["ensemble_scheduling"]["step"]
    assert [(step["model_name"], step["model_version"]) for step in steps] == [("sum", -1), ("double", -1), ("less", -1)]
    assert steps[0]["input_map"] == {"left": "small", "right": "IN"}
    assert "dynamic_batching" not in config

    def counted(name: str) -> tuple[int, int]:
        (statistics,) = client.get_inference_statistics(name)["model_stats"]
        return statistics["inference_count"], statistics["execution_count"]

    inferences, executions = counted("all")
    ask(client, rows(2))
    assert counted("all") == (inferences + 2, executions + 1)
    assert counted("double") == (0, 0), "a request for the ensemble is none for its steps"


@on_cores
def test_an_ensemble_can_be_loaded_with_its_own_configuration(changing: triton.InferenceServerClient) -> None:
    changing.load_model("all", config=json.dumps(changing.get_model_config("all")))
    assert ask(changing, rows(2)).tolist() == (3 * rows(2) - 3).tolist()


def test_requests_for_an_ensemble_are_batched(served: Served) -> None:
    given = [[rows(1 + seed % 3, seed) for seed in range(first, 24, 4)] for first in range(4)]

    def ask_all(tensors: list[Any]) -> list[Any]:
        """Each thread has its own client: gevent's sockets may not be used by two threads."""
        with triton.InferenceServerClient(served.address) as client:
            return [ask(client, data) for data in tensors]

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask_all, given))
    for data, answer in zip(chain.from_iterable(given), chain.from_iterable(answers), strict=True):
        assert answer.tolist() == (3 * data - 3).tolist()


def test_unloading_a_step_makes_the_ensemble_unavailable_until_it_is_loaded_again(
    changing: triton.InferenceServerClient,
) -> None:
    changing.unload_model("less")
    assert states(changing) == {"all": "UNAVAILABLE", "double": "READY", "less": "UNAVAILABLE", "sum": "READY"}
    assert refused(changing) == "503: model 'all' is unavailable: its step 'less' was unloaded"
    assert ask(changing, rows(1), tenant="globex").tolist() == (3 * rows(1) - 3).tolist()
    changing.load_model("less")
    assert set(states(changing).values()) == {"READY"}
    assert ask(changing, rows(2)).tolist() == (3 * rows(2) - 3).tolist()


@on_cores
def test_an_unloaded_ensemble_stays_unloaded_when_a_step_is_loaded(changing: triton.InferenceServerClient) -> None:
    changing.unload_model("all")
    changing.load_model("less")
    assert refused(changing) == "503: model 'all' is unavailable: unloaded"


@on_cores
def test_loading_an_ensemble_loads_its_unloaded_steps(changing: triton.InferenceServerClient) -> None:
    for name in ("less", "sum", "all"):
        changing.unload_model(name)
    changing.load_model("all")
    assert set(states(changing).values()) == {"READY"}
    assert ask(changing, rows(2)).tolist() == (3 * rows(2) - 3).tolist()


def test_a_reloaded_step_is_used_by_the_ensemble(root: Path, kind: str, changing: triton.InferenceServerClient) -> None:
    write(root, "less", LESS.replace("three = {3}", "three = {5}"), kind == "gpu")
    assert ask(changing, rows(2)).tolist() == (3 * rows(2) - 3).tolist(), "only a load looks at the files"
    changing.load_model("less")
    assert ask(changing, rows(2)).tolist() == (3 * rows(2) - 5).tolist()
    assert ask(changing, rows(2), tenant="globex").tolist() == (3 * rows(2) - 3).tolist()


@on_cores
def test_a_failed_reload_of_a_step_or_of_the_ensemble_keeps_the_served_models(
    root: Path, changing: triton.InferenceServerClient
) -> None:
    for path in (root / "less" / "1").iterdir():
        path.write_bytes(b"no model")
    with pytest.raises(InferenceServerException, match="failed to load 'less'"):
        changing.load_model("less")
    ensemble(root, CONFIG.replace('"less"', '"fewer"'))
    with pytest.raises(InferenceServerException, match=r"ensemble_scheduling\.step\[2\] \(fewer\) is not in the repository"):
        changing.load_model("all")
    assert set(states(changing).values()) == {"READY"}
    assert ask(changing, rows(2)).tolist() == (3 * rows(2) - 3).tolist()


@on_cores
def test_a_step_that_no_longer_fits_makes_the_ensemble_unavailable(
    root: Path, kind: str, changing: triton.InferenceServerClient
) -> None:
    write(root, "less", LESS.replace("float[m, 3] b)", "float[m, 3] c)").replace("b =", "c ="), kind == "gpu")
    changing.load_model("less")
    why = "ensemble_scheduling.step[2] (less): the model has no 'b'; there are c"
    assert refused(changing) == f"503: model 'all' is unavailable: {why}"
    write(root, "less", LESS, kind == "gpu")
    changing.load_model("less")
    assert ask(changing, rows(2)).tolist() == (3 * rows(2) - 3).tolist()


@on_cores
def test_all_steps_are_models_of_the_tenant_s(client: triton.InferenceServerClient) -> None:
    assert refused(client, tenant="poor") == (
        "503: model 'all' is unavailable: ensemble_scheduling.step[0] (sum) is not a model of this tenant's"
    )


@on_cores
def test_steps_that_do_not_fit_together_are_refused_with_their_names(tmp_path: Path, kind: str) -> None:
    fill(tmp_path, kind)
    wrong = {
        "nested": (
            CONFIG.replace('"less"', '"all"'),
            "step[2] (all) is an ensemble, which cannot be a step; name its steps instead",
        ),
        "nowhere": (CONFIG.replace('"less"', '"fewer"'), "step[2] (fewer) is not in the repository"),
        "version": (
            CONFIG.replace("model_version: -1", "model_version: 7"),
            "step[0] (sum) has no version 7 that is served; there is 1",
        ),
        "key": (CONFIG.replace('key: "a"', 'key: "z"'), "step[2] (less): no tensor is given for input 'a'; the model's are a"),
        "value": (CONFIG.replace('value: "OUT"', 'value: "ELSE"'), "no step gives 'OUT'"),
        "batch": (
            CONFIG.replace("max_batch_size: 8", "max_batch_size: 16"),
            "the ensemble's largest batch is 16, but ensemble_scheduling.step[1] (double) takes batches of up to 8",
        ),
        "unused": (
            CONFIG + 'input { name: "ELSE" data_type: TYPE_FP32 dims: 1 }',
            "contradicts the model: no step takes input 'ELSE'; of the ensemble the steps take 'IN'",
        ),
        "type": (CONFIG.replace("TYPE_FP32", "TYPE_INT32"), "contradicts the model: 'IN' is TYPE_INT32, but TYPE_FP32"),
    }
    for name, (config, _) in wrong.items():
        ensemble(tmp_path, config, name)
    with served_by(kind, tmp_path) as served, client_to(served) as http:
        index = {entry["name"]: entry for entry in http.post("/v2/repository/index").json()}
        for name, (_, why) in wrong.items():
            assert index[name]["state"] == "UNAVAILABLE"
            assert why in index[name]["reason"], name
            assert str(tmp_path) not in index[name]["reason"]
        assert index["all"]["state"] == "READY"


def test_an_ensemble_moves_with_its_tenant(served: Served, client: triton.InferenceServerClient) -> None:
    before = rows(4)
    assert ask(client, before).tolist() == (3 * before - 3).tolist()
    acme = 2 if served.runtime.device.kind == "cpu" else 1
    served.call(served.controller.repartition({"globex": 1, "acme": acme, "poor": 1}))
    for count in (4, 5):
        assert ask(client, rows(count)).tolist() == (3 * rows(count) - 3).tolist()
    assert sum(execution.tenant == "acme" for execution in served.call(served.controller.executions())) >= 4


@pytest.mark.parametrize("kind", ["gpu"], indirect=True)
def test_on_a_gpu_all_steps_are_one_graph(served: Any, client: triton.InferenceServerClient) -> None:
    execution = json.loads(client.get_model_config("all")["parameters"]["greenlane.execution"]["string_value"])
    assert execution["graphs"] == "captured"
    ask(client, rows(2))
    served.gpu.log.clear()
    ask(client, rows(2, 1))
    assert served.gpu.log.count("cuGraphLaunch") == 1
    assert not any("execute_async" in call for call in served.gpu.log)


@on_cores
def test_an_ensemble_needs_an_empty_version_directory(root: Path, kind: str, changing: triton.InferenceServerClient) -> None:
    shutil.rmtree(root / "all" / "1")
    with pytest.raises(InferenceServerException, match="failed to load 'all': no version in it; expected all/1/"):
        changing.load_model("all")
