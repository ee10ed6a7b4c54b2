"""How models run as a configuration says, on a simulated GPU with the real engines on top: from the file to the executor."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from server.config.schema import Config, DeviceConfig, ModelOptions, ModelsConfig
from server.device.loaded_model import LoadedModel
from server.device.model_loader import open_model_loader
from tests.engines.simulated import AFFINE, ROWS, Bench, assert_right, opened, rows
from tests.engines.small import model

from .gpu import Gpu
from .plans import make_plan
from .tensorrt import library


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as bench, closing(bench):
        yield bench


def load(bench: Bench, config: str = "", **options: Any) -> LoadedModel:
    """A model with this config.pbtxt and these keys of [models.m], on a device whose copies are the copy engines'."""
    folder = bench.folder / "repository" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.plan").write_bytes(make_plan(model(AFFINE), ROWS))
    (folder / "config.pbtxt").write_text(config)
    models = ModelsConfig(repository=folder.parent, options={"m": ModelOptions(**options)})
    settings = Config(device=DeviceConfig(copies="engine"), models=models, tenants={}, source="greenlane.toml")
    return open_model_loader(settings, bench.device).attempt("m", bench.partition)


def described(loaded: LoadedModel) -> Any:
    """What its only executor says, which is closed."""
    (executor,) = loaded.executors.values()
    with closing(executor):
        return executor.describe()


def test_copies_are_those_of_the_device_section_or_of_the_models_own(bench: Bench) -> None:
    assert described(load(bench))["copies"] == "engine"


def test_a_models_own_section_overrules_the_device_and_its_files(bench: Bench) -> None:
    loaded = load(bench, "optimization { cuda { graphs: false } }", copies="sm", graphs="required")
    said = described(loaded)
    assert (said["copies"], said["graphs"], loaded.messages()) == ("sm", "captured", ())
    (served,) = loaded.served
    shown = json.loads(served.config["parameters"]["greenlane.execution"]["string_value"])
    assert shown == {key: value for key, value in said.items() if key != "counts"}


def test_graphs_off_captures_none(bench: Bench) -> None:
    assert described(load(bench, "optimization { cuda { graphs: false } }"))["graphs"] == "none"


def test_graphs_native_uses_the_librarys_own(bench: Bench) -> None:
    assert described(load(bench, graphs="off", cuda_graphs="on"))["graphs"] == "native"


def test_one_instance_is_bound_and_more_are_a_warning(bench: Bench) -> None:
    """All works of a partition are on its one stream, so more executors would bring memory and no concurrency."""
    loaded = load(bench, "instance_group { count: 2 }")
    assert [type(executor).__name__ for executor in loaded.executors.values()] == ["TensorRTExecutor"]
    (warning,) = [message for message in loaded.messages() if "instance_group" in message]
    assert "instance_group.count: 2 cannot be honoured: inferences of a tenant run one after another" in warning


def test_only_configured_warm_up_batches_are_ready(bench: Bench) -> None:
    assert described(load(bench, warm_up=(1, 4)))["shapes"] == [[[1, 3]], [[4, 3]]]


def test_model_warmup_batches_are_ready(bench: Bench) -> None:
    sample = 'inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 } }'
    loaded = load(bench, f"max_batch_size: 8 model_warmup {{ batch_size: 2 {sample} }} model_warmup {{ batch_size: 8 }}")
    assert sorted(described(loaded)["shapes"]) == [[[2, 3]], [[8, 3]]]


def test_a_warm_up_batch_outside_the_profiles_is_a_problem(bench: Bench) -> None:
    (problem,) = load(bench, warm_up=(1, 16)).problems
    assert "warm_up: input 'x': dimension 0 of shape [16, 3] is 16; the engine was built for 0 to 8" in problem.reason


@pytest.mark.parametrize(("config", "padded"), [("max_batch_size: 8", 1), ("", 0)], ids=["batches", "no batches"])
def test_a_batch_that_is_not_ready_is_padded_if_max_batch_size_is_configured(bench: Bench, config: str, padded: int) -> None:
    """Else the first dimension may be anything, such as the length of a text."""
    loaded = load(bench, config, warm_up=(1, 8), copies="sm")
    (executor,) = loaded.executors.values()
    before: Any = executor.describe()["counts"]  # How rows are joined was tried, padded too.
    assert_right(executor, rows(3))
    counts = described(loaded)["counts"]
    assert (counts["padded"] - before["padded"], counts["compilations"] - before["compilations"]) == (padded, 1 - padded)


def test_an_unknown_profile_is_a_problem(bench: Bench) -> None:
    (problem,) = load(bench, profile=1).problems
    assert problem.reason == "m/1/model.plan: profile 1 is asked for, but it has 1, numbered from 0"


def test_a_model_that_cannot_be_captured_is_logged_and_shown_in_its_configuration(bench: Bench) -> None:
    loaded = load(bench, strategy="lazy", copies="sm")
    (line,) = loaded.messages()
    assert line.startswith("model m 1: cannot be captured as a graph (its inputs are dynamic and its kernels 'lazy'")
    assert described(loaded)["graphs"] == "native"


def test_required_graphs_that_cannot_be_captured_are_a_problem(bench: Bench) -> None:
    (problem,) = load(bench, strategy="lazy", copies="sm", graphs="required").problems
    assert "graphs are required, but it cannot be captured as one" in problem.reason


def test_a_setting_that_the_library_lacks_is_a_problem_with_its_key(tmp_path: Path) -> None:
    gpu = Gpu()
    without_strategies = type("IRuntimeConfig", (), {})
    with opened(tmp_path, library(gpu, IRuntimeConfig=without_strategies), gpu) as bench, closing(bench):
        loaded = load(bench, strategy="none", allocation="user_managed")
    assert [problem.reason for problem in loaded.problems] == [
        f"greenlane.toml: models.m.{key} cannot be honoured: TensorRT-RTX 1.6.1.120 has no {field}; leave it out"
        for key, field in (
            ("strategy: 'none'", "dynamic_shapes_kernel_specialization_strategy"),
            ("allocation: 'user_managed'", "allocation_strategy"),
        )
    ]
