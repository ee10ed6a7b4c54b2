"""Requests are joined only where two rows were seen to have the same answers alone and together."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partitions.cpu import CpuDevice, CpuPartition
from server.config.schema import Config, ModelOptions, ModelsConfig
from server.device.loaded_model import LoadedModel
from server.device.model_loader import open_model_loader
from tests.engines.simulated import AFFINE, ROWS
from tests.engines.small import model
from tests.engines.tensors import run
from tests.engines.verification.test_rows import CENTRED, NEVER, SEPARATE
from tests.models import INDEXED, save
from tests.simulation import Gpu, installed
from tests.simulation.plans import make_plan
from tests.simulation.tensorrt import library

OVER_PLACES = """over (float[n, s] x) => (float[n, s] y)
{ m = ReduceMean<axes = [0], keepdims = 1>(x) e = ReduceMean<axes = [1], keepdims = 1>(m) z = Sub(m, e) y = Add(x, z) }"""
"""Rows depend on each other only where there are two places or more."""


def loaded(root: Path, source: str, device: CpuDevice, partition: CpuPartition, **options: Any) -> LoadedModel:
    (root / "m" / "1").mkdir(parents=True, exist_ok=True)
    save(root / "m" / "1" / "model.onnx", source)
    config = Config(
        models=ModelsConfig(repository=root, options={"m": ModelOptions(max_batch=8, **options)}), tenants={}, source="c.toml"
    )
    models = open_model_loader(config, device)
    return models.bind(models.prepare("m"), partition)


@contextmanager
def planned(gpu: Gpu, root: Path, onnx: bytes, shapes: dict[str, list[tuple[int, ...]]]) -> Iterator[LoadedModel]:
    """A plan of this model, bound to a granule of a simulated GPU; all is closed afterwards."""
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.plan").write_bytes(make_plan(onnx, shapes))
    config = Config(models=ModelsConfig(repository=root, options={"m": ModelOptions(max_batch=8)}), tenants={}, source="c.toml")
    with (
        installed(gpu, library(gpu)) as cuda,
        closing(cuda.open_cuda(gpu.index)) as device,
        closing(device.carve([0])) as partition,
        closing(open_model_loader(config, device)) as models,
    ):
        found = models.bind(models.prepare("m"), partition)
        yield found
        partition.attach()
        for executor in found.executors.values():
            executor.close()


def execution(found: LoadedModel) -> Any:
    return json.loads(found.served[0].config["parameters"]["greenlane.execution"]["string_value"])


def test_a_model_whose_rows_are_separate_is_joined(tmp_path: Path, device: CpuDevice, partition: CpuPartition) -> None:
    found = loaded(tmp_path, SEPARATE, device, partition)
    assert found.served[0].batching
    assert not found.warnings
    assert execution(found)["rows"] == "separate"


@pytest.mark.parametrize("source", [CENTRED, OVER_PLACES])
def test_a_model_whose_rows_depend_on_each_other_is_served_and_not_joined(
    source: str, tmp_path: Path, device: CpuDevice, partition: CpuPartition
) -> None:
    found = loaded(tmp_path, source, device, partition)
    assert found.served[0].batching is None
    (warning,) = found.warnings
    assert warning.startswith("model m 1: requests are not joined into batches: its rows depend on each other: output 'y'")
    assert execution(found)["rows"].startswith("depend on each other: output 'y'")
    assert found.served[0].config.get("dynamic_batching") is None
    assert found.served[0].signature.max_batch == 8


def test_nothing_is_looked_at_where_verify_is_off(tmp_path: Path, device: CpuDevice, partition: CpuPartition) -> None:
    found = loaded(tmp_path, CENTRED, device, partition, verify="off")
    assert found.served[0].batching
    assert "rows" not in execution(found)


@pytest.mark.parametrize(("verify", "joined"), [("on", True), ("required", False)])
def test_a_model_of_which_nothing_is_known_is_joined_unless_that_is_required(
    verify: str, joined: bool, tmp_path: Path, device: CpuDevice, partition: CpuPartition
) -> None:
    found = loaded(tmp_path, NEVER, device, partition, verify=verify)
    assert bool(found.served[0].batching) is joined
    assert execution(found)["rows"] == "unknown: its answers to random inputs are not finite, or all 0"
    assert bool(found.warnings) is not joined


def test_a_gpu_adds_no_rows_to_a_model_whose_rows_depend_on_each_other(tmp_path: Path) -> None:
    gpu = Gpu()
    centred = AFFINE.replace("t = Add(x, x)", "m = ReduceMean<axes = [0], keepdims = 1>(x) t = Sub(x, m)")
    for name, source in {"centred": centred, "affine": AFFINE}.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.plan").write_bytes(make_plan(model(source), ROWS))
    with installed(gpu, library(gpu)) as cuda:
        device = cuda.open_cuda(gpu.index)
        partition = device.carve([0])
        options = {name: ModelOptions(max_batch=8) for name in ("centred", "affine")}
        config = Config(models=ModelsConfig(repository=tmp_path, options=options), tenants={}, source="c.toml")
        models = open_model_loader(config, device)
        both = {name: models.bind(models.prepare(name), partition) for name in options}
        assert [bool(each.served[0].batching) for each in both.values()] == [False, True]
        partition.attach()
        rows = np.arange(9, dtype=np.float32).reshape(3, 3)
        for name, padded in (("centred", 0), ("affine", 1)):
            (executor,) = both[name].executors.values()
            before = executor.describe()["counts"]["padded"]  # type: ignore[index]
            (answer,) = run(executor, rows)
            assert executor.describe()["counts"]["padded"] - before == padded  # type: ignore[index]
            assert np.allclose(answer, (rows - rows.mean(0) if name == "centred" else 2 * rows) - 3)
            executor.close()
        models.close()
        partition.close()
        device.close()
    assert not any(name.startswith("cuMemHost") for name in gpu.log)


@pytest.mark.parametrize("source", [INDEXED, INDEXED.replace("float[n, 3] x", "bfloat16[n, 3] x")])
def test_a_model_that_makes_indices_of_floats_is_joined(
    source: str, tmp_path: Path, device: CpuDevice, partition: CpuPartition
) -> None:
    found = loaded(tmp_path, source, device, partition, verify="required")
    assert found.served[0].batching
    assert not found.warnings
    assert execution(found)["rows"] == "separate"


def test_no_index_that_a_plan_makes_of_floats_leaves_its_table(tmp_path: Path) -> None:
    """As a GPU does not check it: zeros, or what is there, or an error that ends all of the device's tenants."""
    gpu = Gpu()
    with planned(gpu, tmp_path, model(INDEXED), {"x": [(1, 3), (2, 3), (8, 3)]}) as found:
        assert not found.problems
        assert found.served[0].batching
        assert execution(found)["rows"] == "separate"


@pytest.mark.parametrize(("first", "joined"), [("t = Add(x, x)", True), ("m = ReduceMean<axes = [0]>(x) t = Sub(x, m)", False)])
def test_a_shape_that_a_plan_answers_wrongly_says_nothing_of_its_rows(first: str, joined: bool, tmp_path: Path) -> None:
    gpu = Gpu()
    gpu.wrong_for = lambda shapes: shapes == ((2, 4),)
    source = f"sized (float[n, s] x) => (float[n, s] y) <float three = {{3}}> {{ {first} y = Sub(t, three) }}"
    with planned(gpu, tmp_path, model(source), {"x": [(1, 2), (2, 4), (8, 8)]}) as found:
        assert bool(found.served[0].batching) is joined
        assert execution(found)["rows"].startswith("separate" if joined else "depend on each other")
